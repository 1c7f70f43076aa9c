"""Requests for videos, and their submission as jobs."""

import time
import uuid
from collections.abc import Callable
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, model_validator

from gateway.answers.diffusion import DiffusionRequest, fill_size, require_info
from gateway.answers.gateway import Gateway
from gateway.answers.video_store import VideoJob
from gateway.errors import in_own_terms, invalid
from gateway.media.check import MediaFile, load_media
from gateway.validation import Positive, Strict
from quartet.v1 import dit_pb2, server_info_pb2

TASKS = (dit_pb2.DIT_TASK_TEXT_TO_VIDEO, dit_pb2.DIT_TASK_IMAGE_TO_VIDEO)


def _number(value: Any) -> Any:
    """Parses seconds, which OpenAI's clients send as a text."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


class InputReference(Strict):
    """The first frame."""

    image_url: str | None = Field(default=None, min_length=1, description="https, http or data URL of an image")
    file_id: str | None = Field(default=None, description="refused: there are no uploaded files here")

    @model_validator(mode="after")
    def _is_a_url(self) -> Self:
        if self.image_url is None:
            raise ValueError("must be {image_url: an https, http or data URL}, or a file of a form")
        return self


class VideoRequest(DiffusionRequest):
    """A video to be made: OpenAI's members, and those of the diffusion transformer."""

    seconds: Annotated[float, Field(gt=0), BeforeValidator(_number)] | None = None
    num_frames: Positive | None = Field(default=None, description="instead of seconds")
    size: str | None = Field(default=None, description="WIDTHxHEIGHT in pixels; default: the model's")
    input_reference: InputReference | None = None

    def video_start(self, info: server_info_pb2.DitInfo) -> dit_pb2.DitStart:
        """The stage's start message, without the image. Raises ApiError: 400 naming the member at fault."""
        start = self.start(info)
        start.pixel_format = dit_pb2.PIXEL_FORMAT_UINT8
        if self.size is not None:
            fill_size(start, self.size, info, "H.264")
        start.num_frames = self._frames(info)
        return start

    def _frames(self, info: server_info_pb2.DitInfo) -> int:
        """The possible number of frames nearest to `seconds`. Raises ApiError: 400."""
        multiple = max(1, info.frames_multiple)
        if self.num_frames is not None:
            if self.seconds is not None:
                raise invalid("num_frames", "says the same as seconds; send one of the two")
            if self.num_frames > info.max_frames:
                raise invalid("num_frames", f"must be at most {info.max_frames}")
            if (self.num_frames - 1) % multiple:
                raise invalid("num_frames", f"must be 1 more than a multiple of {multiple}")
            return self.num_frames
        if self.seconds is None:
            return info.default_frames
        frames = round(min(self.seconds, 1e6) * info.frames_per_second / multiple) * multiple + 1
        if frames > max(info.max_frames, 1):
            most_s = info.max_frames / info.frames_per_second
            raise invalid("seconds", f"must be at most {most_s:.4g}: the model makes {info.max_frames} frames at most")
        return frames


async def submit_video(
    gateway: Gateway,
    request: VideoRequest,
    image: MediaFile | None,
    owner: str | None,
    on_end: Callable[[], object],
    log: dict[str, Any],
) -> VideoJob:
    """Submits a job, which no crash can lose. `on_end` is called at its end; not if this raises.

    Raises:
        ApiError: 400 naming the member at fault; 429, too many wait; 503, the stage does not serve.
    """
    stage, jobs = gateway.catalog.stage_for("video", gateway.catalog.meant(request.model, "video")), gateway.videos
    assert jobs is not None, "there are jobs where a stage makes videos"
    info = require_info(stage, TASKS, "videos")
    start = request.video_start(info)
    if image is None and dit_pb2.DIT_TASK_TEXT_TO_VIDEO not in info.tasks:
        raise invalid("input_reference", "required: this model animates an image", "missing_required_parameter")
    if image is not None:
        if dit_pb2.DIT_TASK_IMAGE_TO_VIDEO not in info.tasks:
            raise invalid("input_reference", "this model makes videos of a prompt alone; leave it out")
        await load_media(gateway.fetcher, [image])
        start.images.add(field=image.field)
    video = VideoJob(
        id=f"video_{uuid.uuid4().hex}",
        model=gateway.catalog.model_of(stage) or "",
        prompt=request.prompt,
        status="queued",
        progress=0,
        created_at=int(time.time()),
        width=start.width or info.default_width,
        height=start.height or info.default_height,
        frames=start.num_frames,
        frames_per_second=info.frames_per_second,
        seed=str(request.seed) if request.seed is not None else None,
        owner=owner,
    )
    start.request_id = video.id
    log |= {"video": video.id, "frames": video.frames}
    with in_own_terms():
        await jobs.submit(video, stage, start, image and image.content, on_end=on_end)
    return video


def video_object(video: VideoJob) -> dict[str, Any]:
    """OpenAI's Video, with a `quartet` object."""
    as_stored = ("id", "model", "status", "progress", "created_at", "completed_at", "prompt")
    error = {"code": video.error_code, "message": video.error_message} if video.error_code else None
    return {
        "object": "video",
        **{name: getattr(video, name) for name in as_stored},
        "expires_at": None if video.expires_at is None else int(video.expires_at),
        "seconds": f"{video.frames / (video.frames_per_second or 1):.4g}",
        "size": f"{video.width}x{video.height}",
        "remixed_from_video_id": None,
        "error": error,
        "quartet": {
            "seed": None if video.seed is None else int(video.seed),
            "num_frames": video.frames,
            "frames_per_second": video.frames_per_second,
        },
    }
