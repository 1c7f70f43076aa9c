"""A bounded queue of events for the client, and a response's gate to it."""

import asyncio
from collections import deque
from collections.abc import Iterable
from typing import Any

from starlette.websockets import WebSocket

from gateway.dialects.realtime.conversation.conversation import Conversation
from gateway.dialects.realtime.output.server_events import ServerEvent, SoundDelta
from gateway.http.json_writer import to_json
from gateway.settings import MIB

_MAX_BYTES = 4 * MIB
_MAX_HELD = 512  # events of a speculative response; beyond, the pipeline waits
SEND_S = 30.0  # a client that reads nothing for so long is gone


class SlowReader(Exception):
    """The client does not read what it is sent."""


class Outbox:
    """Events that wait for the socket. Producers of many await `room` before each."""

    def __init__(self) -> None:
        self.texts: deque[str] = deque()
        self._bytes, self._closed = 0, False
        self._changed = asyncio.Event()  # something to send
        self._room = asyncio.Event()
        self._room.set()

    async def room(self) -> None:
        await self._room.wait()

    def put(self, event: dict[str, Any]) -> None:
        """Queues an event, also if there is no room."""
        text = to_json(event).decode()
        self.texts.append(text)
        self._count(len(text))
        self._changed.set()

    def finish(self) -> None:
        """Lets `send` return after the last event."""
        self._closed = True
        self._changed.set()

    async def send(self, socket: WebSocket) -> None:
        """Sends until `finish`. Raises SlowReader."""
        while True:
            while self.texts:
                text = self.texts.popleft()
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


class EventGate:
    """Between one response and the outbox. For a speculative response it is closed until `release`."""

    def __init__(self, outbox: Outbox, conversation: Conversation | None, speculative: bool) -> None:
        self._outbox, self._conversation = outbox, conversation
        self._pending = deque[ServerEvent]()
        self._held: deque[ServerEvent] | None = deque() if speculative else None
        self._released = asyncio.Event()

    @property
    def is_closed(self) -> bool:
        return self._held is not None

    def add(self, events: Iterable[ServerEvent]) -> None:
        self._pending.extend(events)

    def drop_sound(self) -> None:
        self._pending = deque(event for event in self._pending if not isinstance(event, SoundDelta))

    async def send(self, *events: ServerEvent) -> None:
        """Sends pending events, then `events`. A cancellation leaves the rest to the next call."""
        self._pending.extend(events)
        while self._pending:
            if self._held is None:
                await self._outbox.room()
                self._put(self._pending.popleft())
            elif len(self._held) < _MAX_HELD:
                self._held.append(self._pending.popleft())
            else:
                await self._released.wait()

    async def released(self) -> None:
        if self._held is not None:
            await self._released.wait()

    async def release(self) -> None:
        """Sends the held events and opens the gate."""
        while self._held:
            await self._outbox.room()
            self._put(self._held.popleft())
        self._held = None
        self._released.set()

    def _put(self, event: ServerEvent) -> None:
        self._outbox.put(event.apply(self._conversation))
