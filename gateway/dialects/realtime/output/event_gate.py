"""A response's events on their way to the client, in order: held back at first, if an answer was begun in a pause."""

import asyncio
from collections import deque
from collections.abc import Iterable

from gateway.dialects.realtime.output.outbox import Outbox
from gateway.dialects.realtime.output.output_item import SoundStep, Step

_MAX_HELD = 512  # beyond, the pipeline waits


class Telling:
    """One response's.

    Args:
        outbox: takes the events.
        held: the events are held back until `release`.
    """

    def __init__(self, outbox: Outbox, held: bool) -> None:
        self._outbox, self._untold = outbox, deque[Step]()
        self._held: deque[Step] | None = deque() if held else None
        self._released = asyncio.Event()

    @property
    def is_held(self) -> bool:
        """Whether the client was told nothing yet."""
        return self._held is not None

    def add(self, steps: Iterable[Step]) -> None:
        """Leaves `steps` to the next `tell`."""
        self._untold.extend(steps)

    def drop_sound(self) -> None:
        """The sound that was added, and not told, is not sent: nobody is to hear it."""
        self._untold = deque(step for step in self._untold if not isinstance(step, SoundStep))

    async def tell(self, *steps: Step) -> None:
        """Tells all that was added, then `steps`. A cancellation leaves the rest to the next call."""
        self._untold.extend(steps)
        while self._untold:
            if self._held is None:
                await self._outbox.room()
                self._outbox.put(self._untold.popleft()())
            elif len(self._held) < _MAX_HELD:
                self._held.append(self._untold.popleft())
            else:
                await self._released.wait()

    async def released(self) -> None:
        """Returns when nothing is held back any more."""
        if self._held is not None:
            await self._released.wait()

    async def release(self) -> None:
        """Tells what was held back; what follows is told at once."""
        while self._held:
            await self._outbox.room()
            self._outbox.put(self._held.popleft()())
        self._held = None
        self._released.set()
