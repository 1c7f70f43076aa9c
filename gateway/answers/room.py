"""How many numbers of embeddings the gateway holds."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

MAX_VALUES = 8 * 1024 * 1024  # numbers of all embeddings of a request: 2,048 of 4,096
ROOM_VALUES = 4 * MAX_VALUES  # of all requests at a time: 128 MiB


class Room:
    """So many numbers that all requests may hold together; who came first goes first."""

    def __init__(self, most: int) -> None:
        self._left, self._turn = most, asyncio.Lock()
        self._freed = asyncio.Event()

    @asynccontextmanager
    async def hold(self, count: int) -> AsyncIterator[None]:
        """Waits until so many, at most all, are free."""
        async with self._turn:
            while self._left < count:
                self._freed.clear()
                await self._freed.wait()
            self._left -= count
        try:
            yield
        finally:
            self._left += count
            self._freed.set()
