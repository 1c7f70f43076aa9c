"""A client of streamed answers that costs next to nothing: it sends, notes when each piece came, and keeps no more."""

import asyncio
import time
from dataclasses import dataclass, field


@dataclass
class Stream:
    """A request and what came of it.

    Attributes:
        sent_s: `time.perf_counter` when it was sent.
        ttft_s: from then until the first of its text; None: none came.
        done_s: when its connection ended.
        tail: the last bytes of its answer.
        received_bytes: in all.
    """

    sent_s: float
    ttft_s: float | None = None
    done_s: float = 0.0
    tail: bytes = b""
    received_bytes: int = 0
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def complete(self) -> bool:
        """Whether its answer came to its end."""
        return b"data: [DONE]" in self.tail


class _Protocol(asyncio.Protocol):
    def __init__(self, stream: Stream, request: bytes, first: bytes) -> None:
        self._stream, self._request, self._first = stream, request, first

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        stream = self._stream
        stream.received_bytes += len(data)
        stream.tail = (stream.tail + data)[-256:]
        if stream.ttft_s is None and self._first in data:
            stream.ttft_s = time.perf_counter() - stream.sent_s

    def connection_lost(self, exc: Exception | None) -> None:
        self._stream.done_s = time.perf_counter()
        self._stream.ended.set()


async def stream(host: str, port: int, path: str, body: bytes, first: bytes) -> Stream:
    """POSTs `body` and reads the answer to its end; `first` is in the piece with the first of its text."""
    head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    request = f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body
    asked = Stream(time.perf_counter())
    await asyncio.get_running_loop().create_connection(lambda: _Protocol(asked, request, first), host, port)
    await asked.ended.wait()
    return asked
