"""An unfinished video of this gateway."""

import asyncio
from dataclasses import replace

from gateway.answers.video_store import VideoJob
from gateway.pipeline.stage import Stage
from quartet.v1 import dit_pb2


class VideoTask:
    """A video that waits or is made.

    Attributes:
        saved: as the store has it.
        stored: set when the store has it.
        ends: whether its end is being stored.
        is_lost: whether its files are to be removed, as it is not this gateway's any more.
    """

    def __init__(self, video: VideoJob, stage: Stage, start: dit_pb2.DitStart) -> None:
        self.video, self.stage, self.start = video, stage, start
        self.saved, self.stored = replace(video), asyncio.Event()
        self.ends = self.is_lost = False
        self.task: asyncio.Task[None]

    @property
    def waits(self) -> bool:
        return self.video.status == "queued"

    def cancel(self) -> None:
        """Cancels the task only once: its cleanup must not be cut short."""
        if not self.task.done() and not self.task.cancelling():
            self.task.cancel()
