"""Ports: servers in the box, reached from outside."""

import random
import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest

from livinglayer.errors import Invalid, Unavailable
from livinglayer.sandbox import Sandbox

SERVER = """
import socket, sys, threading
server = socket.create_server(("127.0.0.1", int(sys.argv[1])))
print("listening", flush=True)
def serve(connection):
    while data := connection.recv(65536):
        connection.sendall(data.upper())
    connection.sendall(b"BYE")
    connection.close()
while True:
    threading.Thread(target=serve, args=(server.accept()[0],), daemon=True).start()
"""


def serve(box: Any, port: int) -> Any:
    """Start a server that says everything louder, and BYE at the end of input."""
    process = box.start(["python3", "-c", SERVER, str(port)])
    for _, data in process.output():
        if b"listening" in data:
            return process
    raise AssertionError(process.wait())


@pytest.fixture
def port() -> int:
    return random.randrange(20_000, 30_000)  # tier process shares the host's


def receive(port: Any, size: int) -> bytes:
    data = b""
    while len(data) < size and (more := port.receive()):
        data += more
    return data


@pytest.mark.core
def test_a_server_in_the_box_is_talked_to(box: Any, port: int) -> None:
    server = serve(box, port)
    connection = box.port(port)
    connection.send(b"hello")
    assert receive(connection, 5) == b"HELLO"
    connection.send(b"more")
    assert receive(connection, 4) == b"MORE"
    connection.end()
    assert receive(connection, 4) == b"BYE"
    assert connection.receive() == b""
    connection.close()
    server.kill()
    server.wait()


@pytest.mark.core
def test_a_port_where_nobody_listens_refuses(box: Any, port: int) -> None:
    with pytest.raises(Unavailable, match="refused"):
        box.port(port)
    for number in (0, 65536, -1, True):
        with pytest.raises(Invalid):
            box.port(number)


def test_much_goes_both_ways_at_once(box: Any, port: int) -> None:
    server = serve(box, port)
    connection, size = box.port(port), 4 << 20
    sender = threading.Thread(target=lambda: (connection.send(b"a" * size), connection.end()))
    sender.start()
    data = receive(connection, size + 3)
    sender.join()
    assert len(data) == size + 3
    assert data.endswith(b"AAABYE")
    server.kill()
    server.wait()


@pytest.mark.core
def test_an_exposed_port_is_an_address_of_the_host(box: Any, port: int) -> None:
    server = serve(box, port)
    address = box.expose(port)
    assert address[0] == "127.0.0.1"
    assert box.expose(port) == address
    with socket.create_connection(address, 10) as connection:
        connection.settimeout(20)
        connection.sendall(b"x" * 300_000)
        connection.shutdown(socket.SHUT_WR)
        data = b""
        while more := connection.recv(65536):
            data += more
    assert data == b"X" * 300_000 + b"BYE"
    server.kill()
    server.wait()


def test_an_exposed_port_ends_with_its_box(make: Callable[..., Any], port: int) -> None:
    box = make()
    serve(box, port)
    address = box.expose(port)
    with socket.create_connection(address, 10) as open_one:
        open_one.sendall(b"x")
        assert open_one.recv(1) == b"X"
        box.kill()
        open_one.settimeout(10)
        assert open_one.recv(1) == b""
    with pytest.raises(OSError):
        socket.create_connection(address, 1)


def test_boxes_do_not_see_each_other_s_ports(make: Callable[..., Any], port: int, tier: str) -> None:
    first, second = make(), make()
    serve(first, port)
    if tier == "process":  # the host's network is everybody's
        assert second.port(port) is not None
        return
    with pytest.raises(Unavailable, match="refused"):
        second.port(port)
    reach = f"import socket; socket.create_connection(('127.0.0.1', {port}), 2)"
    assert second.run(["python3", "-c", reach]).exit_code == 1
    host_only = socket.create_server(("127.0.0.1", 0))
    reach = f"import socket; socket.create_connection(('127.0.0.1', {host_only.getsockname()[1]}), 2)"
    assert second.run(["python3", "-c", reach]).exit_code == 1
    assert Sandbox.connect(first.id).port(port) is not None
    host_only.close()
