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
GUARD_S, ROUNDS = 60.0, 20


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


def until(process: psutil.Process, status: str) -> None:
    while process.status() != status:
        time.sleep(0.001)


def end_as_the_client_leaves(server: ForkServer) -> None:
    """So that the process that forks may see both at once: in about half of the cases."""
    process, before = psutil.Process(server.pid), set(psutil.Process(server.pid).children())
    with connect(server) as connection:
        (child,) = set(process.children()) - before
        process.suspend()
        try:
            until(process, psutil.STATUS_STOPPED)
            ask(connection, b"one")
            until(child, psutil.STATUS_ZOMBIE)
            connection.close()
        finally:
            process.resume()
    while child.is_running():
        time.sleep(0.001)


def test_a_client_that_leaves_as_its_process_ends_ends_no_other(server: ForkServer) -> None:
    with connect(server) as second, connect(server) as third:
        own_id = server.pid
        for _ in range(ROUNDS):
            end_as_the_client_leaves(server)
        with connect(server) as fourth:
            ask(fourth, b"four")
        ask(second, b"two")
        assert server.pid == own_id
        third.close()  # before it has an answer
