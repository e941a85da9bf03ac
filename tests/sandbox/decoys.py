"""Listeners that must hear nothing, and an ear on every wire of the host."""

from __future__ import annotations

import json
import os
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

SOL_PACKET, PACKET_STATISTICS, SO_RCVBUFFORCE, ETH_P_ALL = 263, 6, 33, 3


def own_addresses() -> list[str]:
    """Every IPv4 address of this host."""
    said = subprocess.run(["ip", "-j", "-4", "addr"], capture_output=True, check=True).stdout
    return [address["local"] for link in json.loads(said) for address in link["addr_info"]]


class Decoys:
    """TCP and UDP at every address of the host, IPv6 loopback, an abstract and a named Unix socket, ICMP: whoever comes is counted."""

    def __init__(self, directory: Path) -> None:
        self.heard: list[tuple[str, object]] = []
        self.abstract = f"\0decoy-{directory.name}"
        self.named = str(directory / "decoy.sock")
        self._sockets: list[socket.socket] = []
        first = self._listen("tcp", socket.AF_INET, socket.SOCK_STREAM, ("0.0.0.0", 0))
        self.port: int = first.getsockname()[1]
        self._listen("udp", socket.AF_INET, socket.SOCK_DGRAM, ("0.0.0.0", self.port))
        self.ipv6 = socket.has_ipv6 and Path("/proc/net/if_inet6").exists()
        if self.ipv6:
            self._listen("tcp6", socket.AF_INET6, socket.SOCK_STREAM, ("::", self.port))
            self._listen("udp6", socket.AF_INET6, socket.SOCK_DGRAM, ("::", self.port))
        self._listen("abstract", socket.AF_UNIX, socket.SOCK_STREAM, self.abstract)
        self._listen("unix", socket.AF_UNIX, socket.SOCK_STREAM, self.named)

    def _listen(self, what: str, family: int, kind: int, address: object) -> socket.socket:
        made = socket.socket(family, kind)
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        made.bind(address)  # type: ignore[arg-type]
        if kind == socket.SOCK_STREAM:
            made.listen(64)
        self._sockets.append(made)
        threading.Thread(target=self._hear, args=(what, made, kind == socket.SOCK_STREAM), daemon=True).start()
        return made

    def _hear(self, what: str, made: socket.socket, stream: bool) -> None:
        while True:
            try:
                if stream:
                    connection, sender = made.accept()
                    connection.close()
                else:
                    _, sender = made.recvfrom(65536)
            except OSError:
                return
            self.heard.append((what, sender))

    def close(self) -> None:
        for one in self._sockets:
            one.close()


class Wiretap:
    """Every packet of the host's network namespace, on every device, searched for marks."""

    def __init__(self, *marks: bytes) -> None:
        self.marks, self.found, self.packets = marks, [], 0  # type: ignore[var-annotated]
        self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
        self._socket.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 256 << 20)
        self._socket.settimeout(0.2)
        self._over = False
        self._thread = threading.Thread(target=self._listen, daemon=True)

    def _listen(self) -> None:
        while True:
            try:
                packet, (device, *_) = self._socket.recvfrom(1 << 17)
            except TimeoutError:
                if self._over:
                    return
                continue
            self.packets += 1
            lower = packet.lower()  # names on the wire may change their case
            self.found += [(device, mark) for mark in self.marks if mark in packet or mark.lower() in lower]

    def __enter__(self) -> Wiretap:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        time.sleep(0.1)
        self._over = True
        self._thread.join()
        self.dropped = struct.unpack("II", self._socket.getsockopt(SOL_PACKET, PACKET_STATISTICS, 8))[1]
        self._socket.close()


def files_with(
    marks: tuple[bytes, ...], root: Path, skip: Callable[[Path], bool] = lambda path: False
) -> Iterator[str]:
    """Regular files below `root` that hold one of the marks, the data of sparse ones read as it lies there."""

    for at, _, names in os.walk(root):
        for name in names:
            path = Path(at, name)
            if path.is_file() and not path.is_symlink() and not skip(path) and holds(path, marks):
                yield str(path)


def holds(path: Path, marks: tuple[bytes, ...]) -> bool:
    """Whether a file holds one of the marks."""

    longest = max(map(len, marks))
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        size, at = os.fstat(fd).st_size, 0
        while at < size:
            try:
                begin = os.lseek(fd, at, os.SEEK_DATA)
                end = os.lseek(fd, begin, os.SEEK_HOLE)
            except OSError:  # nothing but a hole from here on
                return False
            tail, at = b"", begin
            while at < end:
                data = os.pread(fd, min(8 << 20, end - at), at)
                if not data:
                    break
                if any(mark in tail + data for mark in marks):
                    return True
                tail, at = data[-longest:], at + len(data)
        return False
    finally:
        os.close(fd)


def memory_with(pid: int, marks: tuple[bytes, ...]) -> list[str]:
    """Mappings of a process in which one of the marks lies."""
    found = []
    try:
        with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "rb", 0) as memory:
            for line in maps:
                span, rights, *_ = line.split()
                begin, end = (int(part, 16) for part in span.split("-"))
                if "r" not in rights or "vvar" in line or "vsyscall" in line or end - begin > 1 << 30:
                    continue
                try:
                    memory.seek(begin)
                    data = memory.read(end - begin)
                except (OSError, ValueError, OverflowError):
                    continue
                if any(mark in data for mark in marks):
                    found.append(line.strip())
    except (OSError, ProcessLookupError):
        pass
    return found
