"""A process that forks one for each connection: none of them ends it."""

import socket
import sys
import time
from collections.abc import Iterator

import psutil
import pytest

from services.common.engine.forking import HELLO, ForkServer

ECHO = (
    "from services.common.engine.forking import serve; serve(lambda connection: connection.sendall(connection.recv(9)))"
)
GUARD_S = 60.0


@pytest.fixture
def server() -> Iterator[ForkServer]:
    server = ForkServer([sys.executable, "-c", ECHO])
    yield server
    server.close()


def connect(server: ForkServer) -> socket.socket:
    connection = server.connect()
    connection.settimeout(GUARD_S)
    assert connection.recv(len(HELLO)) == HELLO
    return connection


def ask(connection: socket.socket, word: bytes) -> None:
    connection.sendall(word)
    assert connection.recv(9) == word


def test_a_client_that_leaves_as_its_process_ends_ends_no_other(server: ForkServer) -> None:
    with connect(server) as first, connect(server) as second, connect(server) as third:
        process = psutil.Process(server.pid)
        (child, *_) = sorted(process.children(), key=lambda each: each.pid)
        process.suspend()  # so that it sees both at once
        try:
            ask(first, b"one")
            while child.status() != psutil.STATUS_ZOMBIE:
                time.sleep(0.001)
            first.close()
        finally:
            process.resume()
        with connect(server) as fourth:
            ask(fourth, b"four")
        ask(second, b"two")
        assert server.pid == process.pid
        third.close()  # before it has an answer
