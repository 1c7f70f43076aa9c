"""vLLM's member that says how media are read: of it, which frames of videos."""

from typing import Annotated

from pydantic import AfterValidator, Field

from gateway.validation import Strict, ignoring
from quartet.v1 import thinker_pb2

_ALL = -1


def _some(value: float) -> float:
    if value != _ALL and value <= 0:
        raise ValueError("must be above 0; -1 is no limit")
    return value


class VideoIo(Strict):
    """-1 of either is no limit."""

    num_frames: Annotated[int, Field(ge=_ALL, lt=2**31), AfterValidator(_some)] | None = Field(
        default=None, description="most frames of a video, evenly over its length, in pairs"
    )
    fps: Annotated[float, Field(ge=_ALL, le=1000), AfterValidator(_some)] | None = Field(
        default=None, description="frames a second"
    )


class MediaIo(ignoring(Strict, empty=("image", "audio"))):
    video: VideoIo | None = None


class VideoFrameMembers(Strict):
    """Of requests with videos."""

    media_io_kwargs: MediaIo | None = Field(default=None, description="of it, num_frames and fps of video")

    def choose_frames(self, start: thinker_pb2.GenerateStart) -> None:
        video = self.media_io_kwargs and self.media_io_kwargs.video
        if not video or (video.num_frames is None and video.fps is None):
            return
        start.video_frames.SetInParent()
        if video.num_frames not in (None, _ALL):
            start.video_frames.count = video.num_frames
        if video.fps not in (None, _ALL):
            start.video_frames.per_s = video.fps
