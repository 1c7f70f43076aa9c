"""Sends a response's events in order, and holds those of a speculative response back."""

import asyncio
from collections import deque
from collections.abc import Iterable

from gateway.dialects.realtime.conversation.conversation import Conversation
from gateway.dialects.realtime.output.outbox import Outbox
from gateway.dialects.realtime.output.server_events import ServerEvent, SoundDelta

_MAX_HELD = 512  # beyond, the pipeline waits


class EventGate:
    """The gate between one response and the outbox. For a speculative response it is closed until `release`."""

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
        """Sends all pending events, then `events`. A cancellation leaves the rest to the next call."""
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
