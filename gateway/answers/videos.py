"""Requests for videos, and their submission as jobs."""

import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from gateway.answers.diffusion import DiffusionRequest, VideoExtras, fill_size, require_info
from gateway.answers.files.images import ImageReference
from gateway.answers.gateway import Gateway
from gateway.answers.video_store import VideoJob
from gateway.errors import in_own_terms, invalid
from gateway.media.check import MediaFile, load_media
from gateway.store.columns import fits
from gateway.validation import Positive, Strict
from quartet.v1 import dit_pb2, server_info_pb2

TASKS = (dit_pb2.DIT_TASK_TEXT_TO_VIDEO, dit_pb2.DIT_TASK_IMAGE_TO_VIDEO, dit_pb2.DIT_TASK_VIDEO_TO_VIDEO)


def _number(value: Any) -> Any:
    """Parses seconds, which OpenAI's clients send as a text."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


class VideoReference(Strict):
    """A finished video of this server."""

    id: Annotated[str, Field(min_length=1, max_length=100)]


class VideoRequest(DiffusionRequest):
    """A video to be made: OpenAI's members, and those of the diffusion transformer."""

    seconds: Annotated[float, Field(gt=0), BeforeValidator(_number)] | None = None
    num_frames: Positive | None = Field(default=None, description="instead of seconds")
    size: str | None = Field(default=None, description="WIDTHxHEIGHT in pixels; default: the model's")
    input_reference: ImageReference | None = Field(default=None, description="the first frame")
    quartet: VideoExtras | None = None

    def linked(self, name: Literal["video", "control_video"]) -> MediaFile | None:
        """The file that a member of `quartet.dit` names."""
        url = self.quartet and self.quartet.dit and getattr(self.quartet.dit, name)
        return MediaFile(f"quartet.dit.{name}", "video", url) if url else None

    def video_start(self, info: server_info_pb2.DitInfo, of_a_video: bool = False) -> dit_pb2.DitStart:
        """The stage's start message, without files. Raises ApiError: 400 naming the member at fault.

        Args:
            of_a_video: whether the frames are those of a video that comes with it.
        """
        start = self.start(info)
        start.pixel_format = dit_pb2.PIXEL_FORMAT_UINT8
        if self.size is not None:
            fill_size(start, self.size, info, "H.264")
        if not of_a_video or self.num_frames is not None or self.seconds is not None:
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


class VideoEditRequest(VideoRequest):
    """A video to be made of another one."""

    video: VideoReference | None = Field(
        default=None, description="a finished video of this server; in a form also a file"
    )


@dataclass(frozen=True)
class VideoInputs:
    """Files that come with a request. `source`: the video of this server that `video` is."""

    image: MediaFile | None = None
    video: MediaFile | None = None
    control_video: MediaFile | None = None
    source: VideoJob | None = None

    @property
    def files(self) -> list[MediaFile]:
        """In the stage's order."""
        return [file for file in (self.image, self.video, self.control_video) if file is not None]

    def check(self, info: server_info_pb2.DitInfo) -> None:
        """Raises ApiError: 400, the model takes other files."""
        tasks, image, video, control = info.tasks, self.image, self.video, self.control_video
        if image is not None and video is not None:
            raise invalid(video.field, "is there with input_reference; send one of the two")
        if image is not None and dit_pb2.DIT_TASK_IMAGE_TO_VIDEO not in tasks:
            raise invalid(image.field, "this model makes no videos of an image; leave it out")
        if video is not None and dit_pb2.DIT_TASK_VIDEO_TO_VIDEO not in tasks:
            raise invalid(video.field, "this model makes no videos of a video; leave it out")
        if image is None and video is None and dit_pb2.DIT_TASK_TEXT_TO_VIDEO not in tasks:
            animates = dit_pb2.DIT_TASK_IMAGE_TO_VIDEO in tasks
            field = "input_reference" if animates else "quartet.dit.video"
            reason = f"this model {'animates an image' if animates else 'changes a video'}"
            raise invalid(field, f"required: {reason}", "missing_required_parameter")
        if (control is not None) != info.control_video:
            wanted = "takes none; leave it out" if control is not None else "needs one, which says where things are"
            raise invalid("quartet.dit.control_video", f"this model {wanted}")


async def submit_video(
    gateway: Gateway,
    request: VideoRequest,
    inputs: VideoInputs,
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
    if not fits(request.prompt):
        raise invalid("prompt", "must not have the character U+0000; leave it out")
    inputs.check(info)
    source, changes = inputs.source, inputs.video is not None and not info.continues_video
    start = request.video_start(info, changes or inputs.control_video is not None)
    reads_more = inputs.image is not None or inputs.video is not None
    if start.num_frames == 1 and reads_more and dit_pb2.DIT_TASK_TEXT_TO_IMAGE in info.tasks:
        field = "seconds" if request.num_frames is None else "num_frames"
        raise invalid(field, f"one frame is made of a prompt alone; ask for {info.frames_multiple + 1} or more")
    await load_media(gateway.fetcher, inputs.files)
    if inputs.image is not None:
        start.images.add(field=inputs.image.field)
    if inputs.video is not None:
        start.video.field = inputs.video.field
    if inputs.control_video is not None:
        start.control_video.field = inputs.control_video.field
    video = VideoJob(
        id=f"video_{uuid.uuid4().hex}",
        model=gateway.catalog.model_of(stage) or "",
        prompt=request.prompt,
        status="queued",
        progress=0,
        created_at=int(time.time()),
        width=start.width or info.default_width,
        height=start.height or info.default_height,
        frames=start.num_frames or (source.frames if source is not None else 0),
        frames_per_second=info.frames_per_second,
        seed=str(request.seed) if request.seed is not None else None,
        owner=owner,
        remixed_from=source and source.id,
    )
    start.request_id = video.id
    log |= {"video": video.id, "frames": video.frames}
    with in_own_terms():
        await jobs.submit(video, stage, start, [file.content for file in inputs.files], on_end=on_end)
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
        "remixed_from_video_id": video.remixed_from,
        "error": error,
        "quartet": {
            "seed": None if video.seed is None else int(video.seed),
            "num_frames": video.frames,
            "frames_per_second": video.frames_per_second,
        },
    }
