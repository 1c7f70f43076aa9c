"""A bounded queue of events for the client."""

import asyncio
from collections import deque
from typing import Any

from starlette.websockets import WebSocket

from gateway.http.json_writer import to_json

_MAX_BYTES = 4 * 1024 * 1024
SEND_S = 30.0  # a client that reads nothing for so long is gone


class SlowReader(Exception):
    """The client does not read what it is sent."""


class Outbox:
    """Serialized events that wait for the socket. Producers of many events await `room` before each."""

    def __init__(self) -> None:
        self._texts: deque[str] = deque()
        self._bytes, self._closed = 0, False
        self._changed = asyncio.Event()  # something to send
        self._room = asyncio.Event()
        self._room.set()

    @property
    def texts(self) -> list[str]:
        return list(self._texts)

    async def room(self) -> None:
        await self._room.wait()

    def put(self, event: dict[str, Any]) -> None:
        """Queues an event even if there is no room."""
        text = to_json(event).decode()
        self._texts.append(text)
        self._count(len(text))
        self._changed.set()

    def finish(self) -> None:
        """Lets `send` return after the last event."""
        self._closed = True
        self._changed.set()

    async def send(self, socket: WebSocket) -> None:
        """Sends until `finish`. Raises SlowReader."""
        while True:
            while self._texts:
                text = self._texts.popleft()
                try:
                    async with asyncio.timeout(SEND_S) as limit:
                        await socket.send_text(text)
                except TimeoutError:
                    if not limit.expired():
                        raise
                    raise SlowReader from None
                self._count(-len(text))
            if self._closed:
                return
            self._changed.clear()
            await self._changed.wait()

    def _count(self, change: int) -> None:
        self._bytes += change
        if self._bytes < _MAX_BYTES:
            self._room.set()
        else:
            self._room.clear()
