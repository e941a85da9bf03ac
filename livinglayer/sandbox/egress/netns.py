"""Network namespaces for boxes: no device but loopback, every address answered by the gateway, made ahead of need."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import ctypes
import errno
import os
import socket
import struct
from collections import deque
from dataclasses import dataclass
from typing import NoReturn

from livinglayer.errors import LayerError, Unavailable

GATEWAY = "169.254.170.1"
CHANNEL_PORT, TCP_PORT, DNS_PORT = 7700, 7701, 7702
_NEWNET = 0x40000000
_PAUSE = 0.003  # between two made ahead: the one taken goes out first, and requests are not held up
_libc = ctypes.CDLL(None, use_errno=True)

# Listeners sit on one address and odd ports, so a box has 80, 443 and the rest to itself; what it sends to
# 127.0.0.0/8 stays its own, save DNS, since images name resolvers there too. IPv6 has no route but ::1.
_RULES = f"""table ip layer {{
 chain output {{
  type nat hook output priority -100;
  ip daddr {GATEWAY} tcp dport {CHANNEL_PORT} accept
  udp dport 53 dnat to {GATEWAY}:{DNS_PORT}
  ip daddr 127.0.0.0/8 accept
  meta l4proto tcp dnat to {GATEWAY}:{TCP_PORT}
 }}
}}
""".encode()


@dataclass(frozen=True)
class Network:
    """A namespace and the sockets made inside it; whoever holds the fds holds the way out."""

    netns: int
    tcp: int
    dns: int
    channel: int

    @property
    def fds(self) -> list[int]:
        return [self.netns, self.tcp, self.dns, self.channel]

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)


def _nftables() -> ctypes.CDLL:
    try:
        nft = ctypes.CDLL("libnftables.so.1")
    except OSError:
        raise Unavailable("libnftables is not installed", hint="apt-get install nftables") from None
    nft.nft_ctx_new.restype = ctypes.c_void_p
    nft.nft_ctx_new.argtypes = [ctypes.c_uint32]
    nft.nft_run_cmd_from_buffer.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
    for name in ("nft_ctx_free", "nft_ctx_buffer_output", "nft_ctx_buffer_error"):
        getattr(nft, name).argtypes = [ctypes.c_void_p]
    nft.nft_ctx_get_error_buffer.argtypes = [ctypes.c_void_p]
    nft.nft_ctx_get_error_buffer.restype = ctypes.c_char_p
    return nft


def _redirect(nft: ctypes.CDLL) -> None:
    # A context belongs to the namespace it was made in (it opens its netlink socket at once), so one for each.
    context = nft.nft_ctx_new(0)
    try:
        nft.nft_ctx_buffer_error(context)
        if nft.nft_run_cmd_from_buffer(context, _RULES):
            said = (nft.nft_ctx_get_error_buffer(context) or b"").decode(errors="replace").strip().splitlines()
            raise Unavailable(
                f"nftables can't redirect: {said[0] if said else 'no reason given'}", hint="modprobe nf_tables nft_nat"
            )
    finally:
        nft.nft_ctx_free(context)


def _message(kind: int, flags: int, body: bytes) -> bytes:
    return struct.pack("=IHHII", 16 + len(body), kind, flags, 1, 0) + body


def _loopback() -> None:
    """Bring lo up and make every IPv4 address local to it (AnyIP)."""
    up = _message(16, 5, struct.pack("=BxHiII", 0, 0, 1, 1, 1))  # RTM_NEWLINK, index 1, IFF_UP
    route = struct.pack("=BBBBBBBBI", 2, 0, 0, 0, 255, 4, 254, 2, 0) + struct.pack("=HHI", 8, 4, 1)
    local = _message(24, 5 | 0x600, route)  # RTM_NEWROUTE: local 0.0.0.0/0 dev lo table local
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as link:
        link.bind((0, 0))
        link.send(up + local)
        for what in ("bring up loopback", "route to loopback"):
            code = struct.unpack_from("=i", link.recv(4096), 16)[0]
            if code:
                raise Unavailable(f"can't {what}: {os.strerror(-code)}")


def _listener(kind: int, port: int, lingers: bool = True) -> int:
    with socket.socket(socket.AF_INET, kind) as sock:
        if not lingers:  # what is accepted ends when it is closed: a namespace in which nothing lingers can serve again
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sock.bind((GATEWAY, port))
        if kind == socket.SOCK_STREAM:
            sock.listen(1024)
        sock.setblocking(False)
        return sock.detach()


def _own_proc() -> int:
    """A /proc that is mounted nowhere, as a directory."""
    context = _libc.syscall(430, b"proc", 1)  # fsopen
    if context < 0:
        return os.open("/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _libc.syscall(431, context, 6, None, None, 0)  # fsconfig: create
        mount = _libc.syscall(432, context, 1, 0)  # fsmount
    finally:
        os.close(context)
    return mount if mount >= 0 else os.open("/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def _allow_low_ports() -> None:
    """Let a box bind 80: the namespace belongs to the host's user namespace, so root of a box could not otherwise.

    In a /proc of its own, since in a shared one every namespace leaves names behind that all later ones are compared with.
    """
    with contextlib.suppress(OSError):
        proc = _own_proc()
        try:
            fd = os.open("sys/net/ipv4/ip_unprivileged_port_start", os.O_WRONLY | os.O_CLOEXEC, dir_fd=proc)
            try:
                os.write(fd, b"0")
            finally:
                os.close(fd)
        finally:
            os.close(proc)


def make(nft: ctypes.CDLL | None = None) -> Network:
    """A new namespace with its sockets; the calling thread is back in its own when this returns or raises."""
    nft = nft or _nftables()
    home = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    made: list[int] = []
    try:
        if _libc.unshare(_NEWNET):
            code = ctypes.get_errno()
            hint = "the gateway needs to be root" if code == errno.EPERM else None
            raise Unavailable(f"can't make a network namespace: {os.strerror(code)}", hint=hint)
        try:
            _loopback()
            _redirect(nft)
            _allow_low_ports()
            made.append(os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC))
            made.append(_listener(socket.SOCK_STREAM, TCP_PORT))
            made.append(_listener(socket.SOCK_DGRAM, DNS_PORT))
            made.append(_listener(socket.SOCK_STREAM, CHANNEL_PORT, lingers=False))
        finally:
            if _libc.setns(home, _NEWNET):
                os._exit(70)  # a thread lost in a box's namespace must not go on
        return Network(*made)
    except BaseException as error:
        for fd in made:
            os.close(fd)
        if isinstance(error, OSError):
            raise Unavailable(f"can't make a network namespace: {error.strerror}") from None
        raise
    finally:
        os.close(home)


class Maker:
    """A process that makes networks. libnftables aborts whoever has a thousand files open (it uses select), as a gateway of many boxes has;
    this one never has more than a few, nor any secret: it is forked before the first comes."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._pid = os.fork()
        if not self._pid:
            _serve(theirs.detach())
        theirs.close()

    def make(self) -> Network:
        """A new network; Unavailable says why there is none."""
        try:
            self._socket.send(b"?")
            said, fds, _, _ = socket.recv_fds(self._socket, 4096, 4, socket.MSG_CMSG_CLOEXEC)
        except OSError:
            said, fds = b"", []
        if len(fds) == 4:
            return Network(*fds)
        for fd in fds:
            os.close(fd)
        if not said:
            os._exit(70)  # without it the gateway is of little use: the host starts both again
        message, _, hint = said.decode().partition("\n")
        raise Unavailable(message or "no file descriptors are left", hint=hint or None)

    def close(self) -> None:
        self._socket.close()
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self._pid, 0)


def _serve(fd: int) -> NoReturn:
    """Make a network whenever one is asked for, until the gateway is gone."""
    try:
        os.dup2(fd, 3)
        os.closerange(4, os.sysconf("SC_OPEN_MAX"))
        with socket.socket(fileno=3) as asked:
            nft = None
            while asked.recv(16):
                try:
                    nft = nft or _nftables()
                    network = make(nft)
                except LayerError as error:
                    asked.send(f"{error.message}\n{error.hint or ''}".encode())
                    continue
                try:
                    socket.send_fds(asked, [b"\n"], network.fds)
                finally:
                    network.close()
    except OSError:
        pass
    finally:
        os._exit(0)


class Pool:
    """Networks made ahead, so that taking one costs nothing."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.ready: deque[Network] = deque()
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="netns")
        self._maker = Maker()
        self._filling: asyncio.Task[None] | None = None

    async def take(self) -> Network:
        """A network from the pool, or a new one when it is empty; Unavailable when none can be made here."""
        try:
            if self.ready:
                return self.ready.popleft()
            return await asyncio.get_running_loop().run_in_executor(self._thread, self._maker.make)
        finally:
            self.fill()

    def fill(self) -> None:
        """Refill in the background."""
        if self._filling is None or self._filling.done():
            self._filling = asyncio.get_running_loop().create_task(self._fill())

    async def _fill(self) -> None:
        loop = asyncio.get_running_loop()
        with contextlib.suppress(LayerError):  # said to whoever takes one
            while len(self.ready) < self.size:
                await asyncio.sleep(_PAUSE)
                self.ready.append(await loop.run_in_executor(self._thread, self._maker.make))

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)
        self._maker.close()
        while self.ready:
            self.ready.popleft().close()
