"""Messages between a decoder's process and those that it works for: a value of JSON, and bytes.

What comes of a decoder is never unpickled.
"""

import json
import socket
import struct
from collections.abc import Callable
from typing import Any

import numpy as np

_HEAD = struct.Struct("<IQ")  # bytes of the value, bytes behind it
_PART_BYTES = 1 << 20


class Wire:
    """Sends and receives. Raises EOFError: the other end is closed.

    Args:
        check: is called while it waits, if `connection` has a timeout, and with each message; may raise.
    """

    def __init__(self, connection: socket.socket, check: Callable[[], object] = lambda: None) -> None:
        self.connection, self._check = connection, check

    def send(self, value: Any, payload: bytes | memoryview = b"") -> None:
        self._check()
        text = json.dumps(value).encode()
        view = memoryview(payload).cast("B") if len(payload) else b""
        for part in (_HEAD.pack(len(text), len(view)) + text, view):
            left = memoryview(part)
            while left:
                try:
                    left = left[self.connection.send(left[:_PART_BYTES]) :]
                except TimeoutError:
                    self._check()
                except OSError:
                    raise EOFError from None

    def receive(self) -> tuple[Any, np.ndarray]:
        """The value, and (n) uint8."""
        self._check()
        value_bytes, payload_bytes = _HEAD.unpack(self.read(_HEAD.size).data)
        return json.loads(bytes(self.read(value_bytes))), self.read(payload_bytes)

    def read(self, size: int) -> np.ndarray:
        read = np.empty(size, np.uint8)
        left = read.data
        while left:
            try:
                count = self.connection.recv_into(left)
            except TimeoutError:
                self._check()
                continue
            except OSError:
                count = 0
            if not count:
                raise EOFError
            left = left[count:]
        return read
