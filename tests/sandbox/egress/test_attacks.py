"""What code in a box, or text injected into it, tries in order to reach what no rule allows: each is tried and seen to fail."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sandbox.egress.boxes import Box, Gateway, local, until
from sandbox.egress.servers import Servers

MakeBox = Callable[..., Box]


class Decoy:
    """A listener on the host that must never hear anything."""

    def __init__(self, address: str = "127.0.0.1", kind: int = socket.SOCK_STREAM) -> None:
        self.sock = socket.socket(socket.AF_INET, kind)
        self.sock.bind((address, 0))
        if kind == socket.SOCK_STREAM:
            self.sock.listen()
        self.sock.setblocking(False)
        self.port = self.sock.getsockname()[1]

    def heard(self) -> bool:
        with contextlib.suppress(BlockingIOError):
            self.sock.accept() if self.sock.type == socket.SOCK_STREAM else self.sock.recv(9)
            return True
        return False


@pytest.fixture
def decoy() -> Iterator[Decoy]:
    made = Decoy()
    yield made
    assert not made.heard()
    made.sock.close()


RAW = """
import socket, sys
out = b""
try:  # a reset can come as early as that
    s = socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=8)
    s.sendall(sys.stdin.buffer.read())
    while data := s.recv(65536): out += data
except OSError as e: out += type(e).__name__.encode()
sys.stdout.buffer.write(out)
"""


def raw(box: Box, request: str, host: str = "index.test", port: int = 80) -> str:
    """What comes back for bytes sent as they are."""
    return box.run(sys.executable, "-c", RAW, host, str(port), input=request).stdout


def statuses(answer: str) -> list[int]:
    return [int(status) for status in re.findall(r"HTTP/1\.1 ([0-9]{3})", answer)]


# ── names ──


@pytest.mark.parametrize(
    "host",
    [
        "index.test.evil.test", "evilindex.test", "evil-index.test", "index.test\0.evil.test", "index.test%00.evil.test", "index.test%2eevil.test",
        "index.test@evil.test", "evil.test#index.test", "evil.test/index.test", "evil.test\\index.test", "evil.test:80:index.test",
        "index.test evil.test", "index.test,evil.test", "index.test\tevil.test", "[::ffff:7f00:1]", "::1", "127.0.0.1", "0177.0.0.1", "0x7f.1",
        "2130706433", "127.1", "index.test:81", "index.test:0", "index.test:080", "ındex.test", "index.test:", "", "xn--ndex-ota.test", "..", "*.test",
    ],
)  # fmt: skip
def test_a_host_header_that_is_not_the_destination(make_box: MakeBox, servers: Servers, host: str) -> None:
    box, seen = make_box([local("*.test", servers.http)]), len(servers.seen)
    answer = raw(box, f"GET / HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n")
    assert statuses(answer) in ([400], [403]), answer
    assert len(servers.seen) == seen
    assert box.events(protocol="http")[0]["verdict"] == "deny"


@pytest.mark.parametrize("host", ["INDEX.test", "index.test.", "index.test:80", "Index.Test.:80"])
def test_other_spellings_of_the_destination_reach_the_server_as_one(
    make_box: MakeBox, servers: Servers, host: str
) -> None:
    box = make_box([local("index.test", servers.http)])
    assert statuses(raw(box, f"GET /spelled HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n")) == [200]
    assert [value for name, value in servers.seen[-1]["headers"] if name == "host"] == ["index.test"]


def test_fronting_by_host_sni_and_authority(make_box: MakeBox, servers: Servers) -> None:
    rules = [local("good.test", servers.h2), local("api.test", servers.h2)]  # both allowed, yet not one for the other
    box, seen = make_box(rules), len(servers.seen)
    for version in ("--http1.1", "--http2"):
        assert box.curl(version, "-H", "Host: api.test", "https://good.test/")[0] == 403
        # SNI and Host agree, the destination is another's
        assert box.curl(version, "--connect-to", "api.test:443:good.test:443", "https://api.test/")[0] == 403
        assert box.curl(version, "--connect-to", "api.test:443:93.184.216.34:443", "https://api.test/")[0] == 403
        assert box.curl(version, "-H", "Host: evil.test", "https://good.test/")[0] == 403
    # Host and destination agree, SNI is another's
    code = """
import socket, ssl
s = ssl.create_default_context().wrap_socket(socket.create_connection(("good.test", 443), 5), server_hostname="api.test")
s.sendall(b"GET / HTTP/1.1\\r\\nHost: good.test\\r\\nConnection: close\\r\\n\\r\\n"); print(s.recv(12))"""
    assert box.python(code) == "b'HTTP/1.1 403'"
    assert len(servers.seen) == seen and len(box.events(9, verdict="deny")) == 9


def test_addresses_instead_of_names(make_box: MakeBox, decoy: Decoy) -> None:
    box = make_box(["good.test", "*.good.test"])
    for url in (
        f"http://127.0.0.1.good.test:{decoy.port}/",
        f"http://10.0.0.1:{decoy.port}/",
        f"http://0x0a000001:{decoy.port}/",
    ):
        assert box.curl(url)[0] in (0, 403)
    # 127.0.0.1 of the box is not that of the host
    assert box.curl(f"http://127.0.0.1:{decoy.port}/")[0] == 0


# ── places ──


@pytest.mark.parametrize(
    "address", ["169.254.169.254", "100.100.100.200", "192.168.0.1", "10.0.0.1", "172.17.0.1", "168.63.129.16"]
)
def test_internal_addresses(make_box: MakeBox, address: str) -> None:
    """Not even a rule for all hosts leads to them."""
    box = make_box(["*"])
    status, text = box.curl(f"http://{address}/latest/meta-data/")
    assert status == 403 and f"'{address}' is at {address}, which is refused" in text
    assert box.events(host=address)[0]["verdict"] == "deny"


def test_names_of_internal_addresses(make_box: MakeBox, decoy: Decoy) -> None:
    """A name that leads to loopback, by the rule's own word and without its leave."""
    box = make_box(
        [
            {"host": "rebind.test", "resolve": f"127.0.0.1:{decoy.port}"},
            {"host": "mapped.test", "resolve": "::ffff:169.254.169.254"},
        ]
    )
    assert box.curl("http://rebind.test/")[0] == 403
    assert box.curl("http://mapped.test/")[0] == 403
    box.rules(
        [
            {"host": "localhost.test", "resolve": "127.0.0.1", "tls": "pass"},
            {"host": "raw.test", "resolve": "127.0.0.1", "protocol": "tcp", "port": decoy.port},
        ]
    )
    assert box.curl("https://localhost.test/")[0] == 0
    assert raw(box, "x", "raw.test", decoy.port) == "ConnectionResetError"
    assert "loopback" in box.events(protocol="tcp")[0]["reason"]


def test_names_the_resolver_knows(own_gateway: Callable[..., Gateway], servers: Servers, tmp_path: Path) -> None:
    """By the host's own resolver: what it answers is judged, not what the name looks like."""
    hosts = tmp_path / "hosts"
    hosts.write_text(
        "127.0.0.1 inner.test\n169.254.169.254 meta.test\n::1 six.test\n::ffff:10.0.0.1 mapped.test\n127.0.0.1 ok.test\n"
    )
    box = Box(own_gateway(hosts=hosts), ["*.test", {"host": "ok.test", "port": servers.http, "private": True}])
    for name in ("inner.test", "meta.test", "six.test", "mapped.test"):
        status, text = box.curl(f"http://{name}/")
        assert status in (403, 502) and ("refused" in text or "does not resolve" in text), text
    assert box.curl(f"http://inner.test:{servers.http}/")[0] == 403
    assert box.curl(f"http://ok.test:{servers.http}/x") == (200, "GET /x")
    box.drop()


def test_a_decoy_on_the_metadata_address(make_box: MakeBox) -> None:
    import ctypes

    if ctypes.CDLL(None).system(b"ip addr add 169.254.169.254/32 dev lo 2>/dev/null") != 0:
        pytest.skip("can't put the metadata address on this machine")
    try:
        decoy = Decoy("169.254.169.254")
        box = make_box(["*", {"host": "*", "port": decoy.port}, {"host": "*", "protocol": "tcp", "port": 22}])
        assert box.curl(f"http://169.254.169.254:{decoy.port}/")[0] == 403
        assert not decoy.heard()
        decoy.sock.close()
    finally:
        ctypes.CDLL(None).system(b"ip addr del 169.254.169.254/32 dev lo")


def test_a_redirect_is_asked_anew(make_box: MakeBox, servers: Servers, decoy: Decoy) -> None:
    box = make_box([local("index.test", servers.http), {"host": "inner.test", "resolve": f"127.0.0.1:{decoy.port}"}])
    for target in (
        f"http://127.0.0.1:{decoy.port}/",
        "http://169.254.169.254/",
        "http://inner.test/",
        "https://evil.test/",
    ):
        assert box.curl("-L", f"http://index.test/redirect?to={target}")[0] in (0, 302, 403)
    assert box.curl("http://index.test/redirect?to=http://inner.test/")[0] == 302


# ── ways around ──

AROUND = """
import encodings.idna, errno, socket, struct
def tries(what, act):
    try: act(); print(what, "WENT")
    except OSError as e: print(what, errno.errorcode.get(e.errno, e))
def udp(address, port, family=socket.AF_INET):
    s = socket.socket(family, socket.SOCK_DGRAM); s.settimeout(0.5); s.connect((address, port)); s.send(b"x"); s.send(b"x"); s.recv(9)
PORT = %d
import os; os.setgroups([]); os.setgid(65534); os.setuid(65534)
tries("udp", lambda: udp("8.8.8.8", PORT))
tries("quic", lambda: udp("93.184.216.34", 443))
tries("ntp", lambda: udp("127.0.0.1", 123))
tries("udp6", lambda: udp("2001:4860:4860::8888", 53, socket.AF_INET6))
tries("tcp6", lambda: socket.create_connection(("2606:2800:220:1::1", 80), 2))
tries("linklocal6", lambda: socket.create_connection(("fe80::1%%lo", PORT), 2))
tries("raw", lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP))
tries("packet", lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 3))
tries("ping", lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM, socket.IPPROTO_ICMP))
tries("broadcast", lambda: udp("255.255.255.255", PORT))
def route():
    s = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0); s.bind((0, 0))
    s.send(struct.pack("=IHHII", 32, 16, 5, 1, 0) + struct.pack("=BxHiII", 0, 0, 1, 0, 1))
    e = struct.unpack_from("=i", s.recv(4096), 16)[0]
    if e: raise OSError(-e, "netlink")
tries("lo down", route)
"""


def test_ways_around_tcp(make_box: MakeBox, decoy: Decoy) -> None:
    box, heard = make_box(["*"]), Decoy(kind=socket.SOCK_DGRAM)
    said = dict(
        line.split(" ", 1) for line in box.python(AROUND % heard.port).replace("lo down", "lo-down").splitlines()
    )
    assert not heard.heard()
    assert "WENT" not in said.values(), said
    assert said["udp6"] == said["tcp6"] == "ENETUNREACH"
    assert said["raw"] == said["packet"] == said["lo-down"] == "EPERM"
    heard.sock.close()


def test_a_mapped_address_is_no_way_around(make_box: MakeBox) -> None:
    box = make_box([])
    code = "import socket; s = socket.socket(socket.AF_INET6); s.settimeout(5); s.connect(('::ffff:93.184.216.34', 80)); s.send(b'GET / HTTP/1.0\\r\\n\\r\\n'); print(s.recv(12))"
    assert box.python(code) == "b'HTTP/1.1 403'"


def test_refused_connections_are_reset_soon(make_box: MakeBox, servers: Servers) -> None:
    box = make_box([])
    code = """
import socket, time
began = time.monotonic()
try: print(socket.create_connection(("93.184.216.34", 22), 5).recv(1))
except ConnectionResetError: print("reset", time.monotonic() - began < 2)"""
    assert box.python(code) == "reset True"
    assert raw(box, "SSH-2.0-x\r\n", "93.184.216.34", 22) == "ConnectionResetError"
    assert len(box.events(2, protocol="tcp", verdict="deny", host="93.184.216.34", port=22)) == 2


def test_proxies_are_refused_clearly(make_box: MakeBox, servers: Servers, decoy: Decoy) -> None:
    box = make_box([local("index.test", servers.https, protocol="https"), local("index.test", servers.http)])
    inside = f"http://127.0.0.1:{decoy.port}"
    for proxy in ("http://93.184.216.34:3128", "http://198.18.0.1:3128"):
        status, text = box.curl("-x", proxy, "http://index.test/x")
        assert status == 403 and "no proxy" in text, text
    for env in ({"http_proxy": inside, "https_proxy": inside}, {"ALL_PROXY": inside, "NO_PROXY": "x"}):
        assert box.curl("http://index.test/x", env=env)[0] == 0  # nothing listens at 127.0.0.1 of the box
    assert box.curl("http://index.test/x", env={"http_proxy": inside, "NO_PROXY": "*"})[0] == 200
    assert box.curl("http://evil.test/x", env={"NO_PROXY": "*"})[0] == 0
    # CONNECT works at the gateway's own address, under the same rules
    assert box.curl("-x", "http://198.18.0.1:3128", "https://index.test/x") == (200, "GET /x")
    assert statuses(raw(box, "CONNECT evil.test:443 HTTP/1.1\r\nHost: evil.test:443\r\n\r\n", "198.18.0.1", 3128)) == [
        403
    ]
    assert statuses(raw(box, f"CONNECT 127.0.0.1:{decoy.port} HTTP/1.1\r\n\r\n", "198.18.0.1", 3128)) == [403]
    assert statuses(raw(box, "CONNECT index.test@evil.test:443 HTTP/1.1\r\n\r\n", "198.18.0.1", 3128)) == [400]
    assert statuses(raw(box, "CONNECT index.test:443 HTTP/1.1\r\nHost: x\r\n\r\n")) == [403]
    answer = raw(box, "CONNECT index.test:443 HTTP/1.1\r\n\r\nSSH-2.0-tunnel\r\n", "198.18.0.1", 3128)
    assert answer.startswith("HTTP/1.1 200") and "SSH" not in answer


def test_dns_carries_nothing_out(own_gateway: Callable[..., Gateway], servers: Servers) -> None:
    """With the host's resolver a decoy that must stay silent, names under no rule or under a wildcard never leave by DNS."""
    box = Box(own_gateway(), ["*.good.test"])
    code = """
import socket
for i in range(50):
    for name in (f"canary{i}.evil.test", f"canary{i}.good.test.evil.test"):
        try: print("RESOLVED", socket.gethostbyname(name))
        except socket.gaierror: pass
    socket.gethostbyname(f"canary{i}.good.test")
print("done")"""
    trace = f"/proc/{box.gateway.process.pid}/net/udp"
    assert box.python(code) == "done"
    assert len(box.events(100, protocol="dns", verdict="deny")) >= 100
    mine = {
        os.readlink(f"/proc/{box.gateway.process.pid}/fd/{fd}")
        for fd in os.listdir(f"/proc/{box.gateway.process.pid}/fd")
    }
    opened = [line.split()[9] for line in open(trace).read().splitlines()[1:]]
    assert not [inode for inode in opened if f"socket:[{inode}]" in mine]  # it has no UDP socket on the host
    box.drop()


# ── HTTP ──


@pytest.mark.parametrize(
    "request_",
    [
        "POST /a HTTP/1.1\r\nHost: index.test\r\nContent-Length: 6\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /evil HTTP/1.1\r\nHost: index.test\r\n\r\n",
        "POST /a HTTP/1.1\r\nHost: index.test\r\nContent-Length: 6\r\nContent-Length: 5\r\n\r\nGET /evil",
        "POST /a HTTP/1.1\r\nHost: index.test\r\nContent-Length: +6\r\n\r\n0\r\n\r\nX",
        "POST /a HTTP/1.1\r\nHost: index.test\r\nContent-Length: 0x6\r\n\r\n0\r\n\r\nX",
        "POST /a HTTP/1.1\r\nHost: index.test\r\nTransfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
        "POST /a HTTP/1.1\r\nHost: index.test\r\nTransfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
        "POST /a HTTP/1.1\r\nHost: index.test\r\nTransfer-Encoding: identity, chunked\r\n\r\n0\r\n\r\n",
        "POST /a HTTP/1.1\r\nHost: index.test\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        "POST /a HTTP/1.1\r\nHost: index.test\r\nTransfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
        "POST /a HTTP/1.0\r\nHost: index.test\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        "GET /a HTTP/1.1\r\nHost: index.test\r\nHost: evil.test\r\n\r\n",
        "GET /a HTTP/1.1\r\n\r\n",
        "GET /a HTTP/1.1\r\nHost: index.test\r\nX: a\0b\r\n\r\n",
        "GET /a HTTP/1.1\r\nHost: index.test\r\nX\x01Y: a\r\n\r\n",
        "GET /a HTTP/1.1\r\nHost: index.test\r\nX: a\rEvil: b\r\n\r\n",
        "GET http://index.test/a HTTP/1.1\r\nHost: index.test\r\n\r\n",
        "GET http://evil.test/a HTTP/1.1\r\nHost: index.test\r\n\r\n",
        "GET //evil.test/\\a HTTP/1.1\r\nHost: index.test\r\n\r\n",
        "GET /a#b HTTP/1.1\r\nHost: index.test\r\n\r\n",
        "GET /a\x7fb HTTP/1.1\r\nHost: index.test\r\n\r\n",
        "GET /a%00b HTTP/1.1\r\nHost: index.test\r\n\r\n",
        "GET @evil.test/ HTTP/1.1\r\nHost: index.test\r\n\r\n",
        "GET * HTTP/1.1\r\nHost: index.test\r\n\r\n",
        "OPTIONS * HTTP/1.1\r\nHost: index.test\r\n\r\n",
        "GET /a HTTP/2.0\r\nHost: index.test\r\n\r\n",
        "GET /a b HTTP/1.1\r\nHost: index.test\r\n\r\n",
        "GET /a\r\n\r\n",
        "GE T /a HTTP/1.1\r\nHost: index.test\r\n\r\n",
        "GET /" + "a" * 70000 + " HTTP/1.1\r\nHost: index.test\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: index.test\r\n" + "X: y\r\n" * 20000 + "\r\n",
    ],
    ids=lambda text: text[:60].replace("\r\n", "|"),
)  # fmt: skip
def test_requests_that_could_be_read_in_two_ways(make_box: MakeBox, servers: Servers, request_: str) -> None:
    box, seen = make_box([local("index.test", servers.http)]), len(servers.seen)
    answer = raw(box, request_)
    assert statuses(answer) and set(statuses(answer)) <= {400, 403, 431}, answer
    assert len(servers.seen) == seen
    assert box.events(protocol="http")[0]["verdict"] == "deny"


def test_a_body_is_a_body(make_box: MakeBox, servers: Servers) -> None:
    """What hides in a body stays there, with either framing, and a second request is judged by itself."""
    box = make_box([local("index.test", servers.http, path="/ok*")])
    hidden = "GET /evil HTTP/1.1\r\nHost: index.test\r\n\r\n"
    answer = raw(box, f"POST /ok HTTP/1.1\r\nHost: index.test\r\nContent-Length: {len(hidden)}\r\n\r\n{hidden}"
                      f"POST /ok HTTP/1.1\r\nHost: index.test\r\nTransfer-Encoding: chunked\r\n\r\n{len(hidden):x}\r\n{hidden}\r\n0\r\n\r\n"
                      "GET /evil2 HTTP/1.1\r\nHost: index.test\r\nConnection: close\r\n\r\n")  # fmt: skip
    assert statuses(answer) == [200, 200, 403]
    assert [one["body"].decode() for one in servers.seen[-2:]] == [hidden, hidden]


def test_headers_of_one_hop_do_not_pass(make_box: MakeBox, servers: Servers) -> None:
    box = make_box([local("index.test", servers.http)])
    raw(box, "GET /ok HTTP/1.1\r\nHost: index.test\r\nConnection: close, X-Secret-Hop, Host\r\nX-Secret-Hop: 1\r\nProxy-Authorization: x\r\n"
             "Keep-Alive: 5\r\nTE: trailers\r\nUpgrade: h2c\r\nX-Kept: 1\r\n\r\n")  # fmt: skip
    assert sorted(name for name, _ in servers.seen[-1]["headers"]) == ["host", "x-kept"]


H2 = """
import socket, ssl, sys, h2.connection, h2.config, h2.events
c = ssl.create_default_context(); c.set_alpn_protocols(["h2"])
s = c.wrap_socket(socket.create_connection(("index.test", 443), 5), server_hostname="index.test")
conn = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True, validate_outbound_headers=False, normalize_outbound_headers=False))
conn.initiate_connection(); s.sendall(conn.data_to_send())
conn.send_headers(1, eval(sys.argv[1]), end_stream=True); s.sendall(conn.data_to_send())
s.settimeout(6)
try:
    while data := s.recv(65536):
        for e in conn.receive_data(data):
            if isinstance(e, h2.events.ResponseReceived): print(dict(e.headers)[b":status"].decode()); sys.exit()
            if isinstance(e, (h2.events.StreamReset, h2.events.ConnectionTerminated)): print("refused"); sys.exit()
    print("refused")
except OSError: print("refused")
"""
PLAIN = [(":method", "GET"), (":scheme", "https"), (":authority", "index.test"), (":path", "/h2")]


@pytest.mark.parametrize(
    ("headers", "answer"),
    [
        (PLAIN, {"200"}),
        ([*PLAIN, ("host", "index.test")], {"200"}),
        ([*PLAIN, ("host", "evil.test")], {"403", "refused"}),
        ([PLAIN[0], PLAIN[1], (":authority", "evil.test"), PLAIN[3]], {"403"}),
        ([*PLAIN[:3], (":path", "https://evil.test/")], {"403", "refused"}),
        ([*PLAIN[:3], (":path", "h2")], {"400", "refused"}),
        ([*PLAIN[:3], (":path", "")], {"400", "refused"}),
        ([*PLAIN[:3], (":path", "/a b")], {"400", "refused"}),
        ([*PLAIN[:3], (":path", "/a\r\nX: y")], {"400", "refused"}),
        ([*PLAIN, (":path", "/evil")], {"400", "refused"}),
        ([*PLAIN, (":authority", "evil.test")], {"400", "refused"}),
        ([PLAIN[0], (":scheme", "http"), *PLAIN[2:]], {"400"}),
        ([(":method", "GET\r\nX: y"), *PLAIN[1:]], {"400", "refused"}),
        ([(":method", "CONNECT"), (":authority", "evil.test:443")], {"400", "403", "refused"}),
        ([(":method", "CONNECT"), (":protocol", "websocket"), *PLAIN[1:]], {"400", "403", "refused"}),
        ([*PLAIN, ("x", "a\r\nEvil: b")], {"400", "refused"}),
        ([*PLAIN, ("x\r\nevil", "b")], {"400", "refused"}),
        ([*PLAIN, ("x: y", "b")], {"400", "refused"}),
        ([*PLAIN, ("transfer-encoding", "chunked")], {"400", "refused"}),
        ([*PLAIN, ("connection", "x")], {"400", "refused"}),
        ([*PLAIN, ("content-length", "5")], {"400", "502", "refused"}),
        ([("x", "y"), *PLAIN], {"400", "refused"}),
        ([PLAIN[0], PLAIN[1], PLAIN[3], ("host", "index.test")], {"200", "refused"}),
    ],
)  # fmt: skip
def test_http2_headers_that_could_be_read_in_two_ways(
    make_box: MakeBox, servers: Servers, headers: Any, answer: set[str]
) -> None:
    box, seen = make_box([local("index.test", servers.https)]), len(servers.seen)
    said = box.run(sys.executable, "-c", H2, repr(headers))
    assert said.stdout.strip() in answer, said
    if "200" not in answer:
        assert len(servers.seen) == seen
    else:
        assert all("evil" not in repr(one) for one in servers.seen[seen:])


def test_a_flood_of_resets_ends_the_connection(make_box: MakeBox, servers: Servers) -> None:
    box = make_box([local("index.test", servers.h2)])
    code = (
        H2.split("conn.send_headers(1")[0]
        + f"""
headers = {PLAIN!r}
try:
    for i in range(2000):
        conn.send_headers(1 + 2 * i, headers, end_stream=True); conn.reset_stream(1 + 2 * i, 8); s.sendall(conn.data_to_send())
    s.settimeout(5)
    while s.recv(65536): pass
    print("ended")
except TimeoutError: print("open")
except OSError: print("ended")"""
    )
    assert box.python(code) == "ended"
    assert box.curl("https://index.test/still")[0] == 200


def test_connections_are_limited(own_gateway: Callable[..., Gateway], servers: Servers) -> None:
    box = Box(own_gateway("--connections", "5"), [local("index.test", servers.http)])
    code = """
import socket
held = [socket.create_connection(("index.test", 80)) for _ in range(5)]
try: print(socket.create_connection(("index.test", 80), 5).recv(1))
except ConnectionResetError: print("reset")
held.pop().close(); import time; time.sleep(0.3)
s = socket.create_connection(("index.test", 80)); s.send(b"GET / HTTP/1.0\\r\\n\\r\\n"); print(s.recv(12))"""
    assert box.python(code) == "reset\nb'HTTP/1.1 200'"
    box.drop()


# ── the gateway itself ──


def test_when_the_gateway_dies_nothing_leaves(own_gateway: Callable[..., Gateway], servers: Servers) -> None:
    first = own_gateway()
    rules = [local("index.test", servers.http), local("db.test", servers.echo, protocol="tcp", port=5432)]
    box = Box(first, rules)
    code = """
import socket, sys, urllib.request
raw = socket.create_connection(("db.test", 5432)); raw.sendall(b"a"); raw.recv(1)
slow = socket.create_connection(("index.test", 80)); slow.sendall(b"POST /length HTTP/1.1\\r\\nHost: index.test\\r\\nContent-Length: 10\\r\\n\\r\\nhalf")
address = socket.gethostbyname("index.test")
print("ready", flush=True); input()
def tries(act):
    try: return act()
    except OSError as e: return type(e).__name__
for sock in (raw, slow):
    sock.settimeout(1)
    tries(lambda: sock.sendall(b"canary")); print(tries(lambda: sock.recv(9)))
def fresh(address, port):
    s = socket.create_connection((address, port), 1); s.sendall(b"GET /canary HTTP/1.0\\r\\n\\r\\n"); return s.recv(9)
print(tries(lambda: fresh(address, 80)), tries(lambda: fresh("93.184.216.34", 80)))
u = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); u.settimeout(1); u.sendto(b"canary", ("198.18.0.1", 53)); print(tries(lambda: u.recv(9)))
"""
    with box.popen(sys.executable, "-c", code, stdin=-1) as process:
        assert process.stdout is not None and process.stdin is not None
        assert process.stdout.readline() == "ready\n"
        first.process.send_signal(signal.SIGKILL)
        first.process.wait()
        seen, accepted = len(servers.seen), servers.accepted
        out, err = process.communicate("\n", timeout=15)
    ended = {"b''", "ConnectionResetError", "TimeoutError", "BrokenPipeError"}
    assert len(out.split()) == 5 and set(out.split()) <= ended, (out, err)
    assert (len(servers.seen), servers.accepted) == (seen, accepted)
    # with a new gateway and the same sockets the box goes on
    box.gateway = own_gateway()
    box.open(rules)
    assert box.curl("http://index.test/again") == (200, "GET /again")
    box.drop()


def test_a_gateway_goes_with_its_host(own_gateway: Callable[..., Gateway]) -> None:
    running = own_gateway()
    running.control.shutdown(socket.SHUT_RDWR)
    assert running.process.wait(5) == 0


def test_a_flood_of_events_slows_the_box_and_loses_none(own_gateway: Callable[..., Gateway]) -> None:
    running = own_gateway()
    box, other = Box(running, ["index.test"]), Box(running, ["index.test"])
    lock = running._changed
    code = """
import socket, struct
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.settimeout(0.2); s.connect(("198.18.0.1", 53)); n = 0
for i in range(3000):
    s.send(struct.pack(">HHHHHH", i, 256, 1, 0, 0, 0) + bytes([len(str(i))]) + str(i).encode() + b"x"[:0] + b"\\4evil\\0\\0\\1\\0\\1")
    try: s.recv(512); n += 1
    except TimeoutError: pass
    if i > 200 and n < i - 5: break
print(n)"""
    stop = threading.Event()

    def hold() -> None:
        with lock:  # the host takes nothing
            stop.wait(3)

    held = threading.Thread(target=hold)
    held.start()
    answered = int(box.python(code))
    stop.set()
    held.join()
    until(lambda: len([one for one in running.events if one["box"] == box.id]) >= answered)
    assert other.python("import socket; print(socket.gethostbyname('index.test')[:5])") == "198.1"
    began = time.monotonic()
    assert running.ask({"do": "close", "box": other.id})[0]["ok"] and time.monotonic() - began < 5
    box.drop()
