"""Body of `POST /v1/videos`, and the Video object."""

from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, model_validator

from gateway.media.video_file import MAX_SIDE_PIXELS
from gateway.openai.diffusion import DiffusionRequest, fill_size
from gateway.openai.errors import invalid
from gateway.pipeline.sampling import Strict
from gateway.videos.store import Video
from quartet.v1 import dit_pb2, server_info_pb2


def _number(value: Any) -> Any:
    """OpenAI's clients send seconds as a text."""
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
    num_frames: Annotated[int, Field(ge=1, lt=2**31)] | None = Field(default=None, description="instead of seconds")
    size: str | None = Field(default=None, description="WIDTHxHEIGHT in pixels; default: the model's")
    input_reference: InputReference | None = None

    def video_start(self, info: server_info_pb2.DitInfo) -> dit_pb2.DitStart:
        """The stage's start message, but for the picture.

        Raises:
            ApiError: 400 naming the member that the model cannot follow.
        """
        start = self.start(info)
        start.pixel_format = dit_pb2.PIXEL_FORMAT_UINT8
        if self.size is not None:
            fill_size(start, self.size, info, "H.264", MAX_SIDE_PIXELS)
        start.num_frames = self._frames(info)
        return start

    def _frames(self, info: server_info_pb2.DitInfo) -> int:
        """Frames to ask for. Seconds become the nearest number of frames that the model can make."""
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


def video_object(video: Video) -> dict[str, Any]:
    """OpenAI's Video, with a `quartet` object."""
    error = {"code": video.error_code, "message": video.error_message} if video.error_code else None
    return {
        "id": video.id,
        "object": "video",
        "model": video.model,
        "status": video.status,
        "progress": video.progress,
        "created_at": video.created_at,
        "completed_at": video.completed_at,
        "expires_at": None if video.expires_at is None else int(video.expires_at),
        "prompt": video.prompt,
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
