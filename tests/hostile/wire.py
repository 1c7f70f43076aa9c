"""Clients that speak HTTP byte by byte, in threads: what they do takes no time of the gateway's event loop."""

import json
import socket
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

TIMEOUT_S = 60.0  # of a machine that stands still


@dataclass(frozen=True)
class Answer:
    """`status` 0: the connection was closed without one."""

    status: int
    body: bytes = b""

    @property
    def error(self) -> dict[str, Any]:
        try:
            body = json.loads(self.body)
        except ValueError:
            return {}
        found = body.get("error") if isinstance(body, dict) else None
        return found if isinstance(found, dict) else {}


class Wire:
    """A connection to the gateway at `url`. `address`: that it comes from."""

    def __init__(self, url: str, receive_buffer: int | None = None, address: str = "") -> None:
        parts = urlsplit(url)
        self.socket = socket.socket()
        self.socket.bind((address, 0))
        if receive_buffer is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.socket.settimeout(TIMEOUT_S)
        self.socket.connect((parts.hostname, parts.port))

    def send(self, data: bytes) -> bool:
        """False: the gateway has closed the connection."""
        try:
            self.socket.sendall(data)
        except (BrokenPipeError, ConnectionResetError):
            return False
        return True

    def read(self) -> Answer:
        """The answer, at the connection's end or that of its body. Raises TimeoutError: nothing came."""
        data = b""
        try:
            while not _is_whole(data) and (piece := self.socket.recv(65536)):
                data += piece
        except ConnectionResetError:
            pass
        head, _, body = data.partition(b"\r\n\r\n")
        return Answer(int(head.split()[1]) if head else 0, body)

    def is_closed(self) -> bool:
        """Waits for the end of the connection. Raises TimeoutError: it stays open."""
        try:
            while self.socket.recv(65536):
                pass
        except ConnectionResetError:
            pass
        return True

    def close(self) -> None:
        self.socket.close()


def _is_whole(data: bytes) -> bool:
    head, end, body = data.partition(b"\r\n\r\n")
    length = next((int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), None)
    return bool(end) and length is not None and len(body) >= length


def head(line: str, headers: dict[str, str]) -> bytes:
    """The request's line and headers."""
    return "\r\n".join([f"{line} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items()), "", ""]).encode()


def ask(url: str, line: str, headers: dict[str, str], body: bytes = b"") -> Answer:
    wire = Wire(url)
    try:
        headers = {"host": "localhost", "connection": "close", "content-length": str(len(body)), **headers}
        wire.send(head(line, headers))
        wire.send(body)
        return wire.read()
    finally:
        wire.close()
