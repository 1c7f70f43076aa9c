"""Which of the waiting videos are made now, over all workers of a gateway."""

import asyncio
from contextlib import suppress

from gateway.access.shared import SharedState
from services.common.errors import QueueFull

_LOOK_AGAIN_S = 0.25  # another worker may give back a place
_FULL_S = 10.0


class VideoPlaces:
    """Videos in the order in which the workers took them on: the first `running` are made, the others wait.

    Args:
        shared: where all workers count.
        queued: videos that may wait.
    """

    def __init__(self, shared: SharedState, running: int, queued: int) -> None:
        self._shared, self._running, self._queued = shared, running, queued
        self._changed = asyncio.Event()

    def take(self, video_id: str) -> None:
        """A place behind all others.

        Raises:
            QueueFull: too many wait.
            ApiError: 503, it cannot be counted now.
        """
        with self._shared.change() as database:
            ((taken,),) = database.execute("SELECT count(*) FROM videos")
            if taken >= self._running + self._queued:
                reason = f"{self._running} videos are being made and {self._queued} wait; retry later"
                raise QueueFull(reason, _FULL_S)
            database.execute("INSERT INTO videos (video, worker) VALUES (?, ?)", (video_id, self._shared.worker))

    async def reach_front(self, video_id: str) -> None:
        """Until fewer than `running` are before it."""
        while self._before(video_id) >= self._running:
            with suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_AGAIN_S):
                    await self._changed.wait()

    def give_back(self, video_id: str) -> None:
        self._shared.settle("DELETE FROM videos WHERE video = ?", video_id)
        self._changed.set()
        self._changed = asyncio.Event()

    def _before(self, video_id: str) -> int:
        before = "SELECT count(*) FROM videos WHERE place < (SELECT place FROM videos WHERE video = ?)"
        return self._shared.every(before, video_id)[0][0]
