# ruff: noqa: B023 (every lambda is called at once)
"""Run inside a box: send a mark to wherever a packet could go, by every way there is. Prints {attempt: outcome} as JSON.

Needs nothing but Python. argv[1] is JSON: {"mark", "addresses", "ports", "names", "abstract", "unix"}.
"""

import json
import os
import socket
import ssl
import struct
import sys

plan = json.loads(sys.argv[1])
mark = plan["mark"].encode()
outcome = {}


def attempt(name, act):
    try:
        outcome[name] = str(act())
    except Exception as error:
        outcome[name] = f"{type(error).__name__} {error}"[:100]


def tcp(family, address, port, tls=False):
    with socket.socket(family, socket.SOCK_STREAM) as one:
        one.settimeout(0.7)
        one.connect((address, port))
        if tls:
            context = ssl._create_unverified_context()
            with context.wrap_socket(one, server_hostname=plan["mark"] + ".decoy.test") as two:
                two.send(mark)
                return two.recv(100)
        one.send(b"GET /" + mark + b" HTTP/1.1\r\nHost: decoy.test\r\n\r\n" + mark)
        return one.recv(100)


def udp(family, address, port, protocol=0):
    with socket.socket(family, socket.SOCK_DGRAM, protocol) as one:
        one.settimeout(0.05)
        one.sendto(mark, (address, port))
        return one.recv(100)


def raw(family, kind, protocol, address):
    with socket.socket(family, kind, protocol) as one:
        one.settimeout(0.05)
        head = struct.pack("!BBHHH", 8, 0, 0, 1, 1)
        checksum = sum(
            struct.unpack(
                f"!{(len(head + mark) + 1) // 2}H", (head + mark).ljust((len(head + mark) + 1) // 2 * 2, b"\0")
            )
        )
        checksum = ~((checksum >> 16) + (checksum & 0xFFFF)) & 0xFFFF
        one.sendto(struct.pack("!BBHHH", 8, 0, checksum, 1, 1) + mark, (address, 0))
        return one.recv(100)


def question(name):
    labels = b"".join(bytes([len(label)]) + label.encode() for label in name.split("."))
    return b"\x12\x34\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00" + labels + b"\0\0\x10\0\1"


def dns(address, over_tcp):
    kind = socket.SOCK_STREAM if over_tcp else socket.SOCK_DGRAM
    with socket.socket(socket.AF_INET, kind) as one:
        one.settimeout(0.3)
        one.connect((address, 53))
        packet = question(plan["mark"] + ".decoy.test")
        one.send((struct.pack("!H", len(packet)) if over_tcp else b"") + packet)
        return one.recv(512)[:4].hex()


def unix(path):
    with socket.socket(socket.AF_UNIX) as one:
        one.connect(path)
        one.send(mark)
        return "connected"


def packet(device):
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0) as one:
        one.bind((device, 0x0800))
        return one.send(b"\xff" * 12 + b"\x08\x00" + mark.ljust(60))


v4, v6 = socket.AF_INET, socket.AF_INET6
for address in plan["addresses"]:
    for port in plan["ports"]:
        attempt(f"tcp {address}:{port}", lambda: tcp(v4, address, port))
        attempt(f"udp {address}:{port}", lambda: udp(v4, address, port))
    attempt(f"tls {address}", lambda: tcp(v4, address, plan["ports"][0], tls=True))
    attempt(f"sctp {address}", lambda: socket.socket(v4, socket.SOCK_STREAM, 132).connect((address, plan["ports"][0])))
    attempt(f"udplite {address}", lambda: udp(v4, address, plan["ports"][0], 136))
    attempt(f"icmp {address}", lambda: raw(v4, socket.SOCK_RAW, socket.IPPROTO_ICMP, address))
    attempt(f"ping {address}", lambda: raw(v4, socket.SOCK_DGRAM, socket.IPPROTO_ICMP, address))
    attempt(f"dns {address}", lambda: dns(address, False))
    attempt(f"dns over tcp {address}", lambda: dns(address, True))
for address in ("::1", "fe80::1", "2001:db8::7", *(f"::ffff:{one}" for one in plan["addresses"])):
    for port in plan["ports"][:2]:
        attempt(f"tcp [{address}]:{port}", lambda: tcp(v6, address, port))
        attempt(f"udp [{address}]:{port}", lambda: udp(v6, address, port))
    attempt(f"ping [{address}]", lambda: raw(v6, socket.SOCK_RAW, socket.IPPROTO_ICMPV6, address))
for name in plan["names"]:
    attempt(f"resolve {name}", lambda: socket.getaddrinfo(name, 80))
attempt("resolve the mark", lambda: socket.getaddrinfo(plan["mark"] + ".decoy.test", 80))
attempt("abstract", lambda: unix("\0" + plan["abstract"]))
attempt("unix", lambda: unix(plan["unix"]))
for device in ("lo", "eth0", "ens3", "ens5"):
    attempt(f"packet {device}", lambda: packet(device))
attempt("vsock", lambda: socket.socket(40, socket.SOCK_STREAM).connect((2, plan["ports"][0])))
attempt("devices", lambda: sorted(name for _, name in socket.if_nameindex()))
attempt("uid", os.getuid)
print(json.dumps(outcome))
