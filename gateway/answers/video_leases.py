"""The leases of the videos that this gateway makes."""

import asyncio
from collections.abc import Mapping
from dataclasses import replace

import structlog

from gateway.answers.video_store import VideoStore
from gateway.answers.video_task import VideoTask
from gateway.errors import ApiError

_LOOK_S = 1.0
_RENEWAL_S = 5.0  # a third of a lease: two may fail

log = structlog.get_logger()


class VideoLeases:
    """Renews leases, stores how far videos are, and stops those that were deleted or ended at another gateway."""

    def __init__(self, store: VideoStore, jobs: Mapping[str, VideoTask]) -> None:
        self._store, self._jobs = store, jobs
        self._renewed_s = -float("inf")

    async def keep(self) -> None:
        """Until it is cancelled."""
        while True:
            await asyncio.sleep(_LOOK_S)
            try:
                await self._look()
            except ApiError:
                pass  # the store has logged it, and may be there again in a second
            except Exception:
                log.exception("the leases of videos could not be renewed")

    async def _look(self) -> None:
        jobs = [job for job in self._jobs.values() if job.stored.is_set()]
        if not jobs:
            return
        changed = [(job, replace(job.video)) for job in jobs if job.video != job.saved]
        now_s = asyncio.get_running_loop().time()
        renews = now_s - self._renewed_s >= _RENEWAL_S
        held = await self._store.keep([job.video.id for job in jobs], [video for _, video in changed], renews)
        if renews:
            self._renewed_s = now_s
        for job, video in changed:
            job.saved = video
        for job in jobs:
            if job.video.id not in held and not job.ends:  # else the store says so when it ends
                job.is_lost = True
                job.cancel()
