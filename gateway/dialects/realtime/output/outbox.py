"""A bounded queue of events for the client, and a response's gate to it."""

import asyncio
from collections import deque
from collections.abc import Iterable
from typing import Any, Protocol

from starlette.websockets import WebSocket

from gateway.dialects.realtime.conversation.conversation import Conversation
from gateway.dialects.realtime.output.server_events import ServerEvent, SoundDelta
from gateway.http.connection import ClientGone
from gateway.http.json_writer import to_json
from gateway.settings import MIB

_MAX_BYTES = 4 * MIB
_MAX_HELD = 512  # events of a speculative response; beyond, the pipeline waits
SEND_S = 30.0  # a client that reads nothing for so long is gone


class SlowReader(ClientGone):
    """The client does not read what it is sent."""


class EventSink(Protocol):
    """Takes a session's events. Producers of many wait for `room` before each."""

    room: asyncio.Event

    def put(self, event: dict[str, Any], /) -> None: ...


class Outbox:
    """Events that wait for the socket. Producers of many wait for `room` before each."""

    def __init__(self) -> None:
        self.texts: deque[str] = deque()
        self._bytes, self._closed = 0, False
        self._changed = asyncio.Event()  # something to send
        self.room = asyncio.Event()
        self.room.set()

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
            self.room.set()
        else:
            self.room.clear()


class EventGate:
    """Between one response and the outbox. For a speculative response it is not `open` until `release`."""

    def __init__(self, outbox: EventSink, conversation: Conversation | None, speculative: bool) -> None:
        self._outbox, self._conversation = outbox, conversation
        self._pending = deque[ServerEvent]()
        self.open = asyncio.Event()
        if not speculative:
            self.open.set()

    def add(self, events: Iterable[ServerEvent]) -> None:
        self._pending.extend(events)

    def drop_sound(self) -> None:
        self._pending = deque(event for event in self._pending if not isinstance(event, SoundDelta))

    async def send(self, *events: ServerEvent) -> None:
        """Sends pending events, then `events`, or keeps them while it is closed. A cancellation leaves the rest to the
        next call."""
        self._pending.extend(events)
        if len(self._pending) > _MAX_HELD:
            await self.open.wait()
        while self._pending and self.open.is_set():
            await self._outbox.room.wait()
            if self._pending:  # or `release` has sent the last one meanwhile
                self._outbox.put(self._pending.popleft().apply(self._conversation))

    async def release(self) -> None:
        """Opens the gate and sends what it held."""
        self.open.set()
        await self.send()
