"""Bodies of `POST /v1/images/generations` and `/v1/images/edits`."""

from typing import Annotated, Any, Literal

from pydantic import Field

from gateway.media.picture_file import MAX_SIDE_PIXELS, PictureFormat
from gateway.openai.diffusion import MAX_PROMPT_CHARACTERS, DiffusionRequest, Guidance, Loras, Steps, fill_size
from gateway.openai.errors import invalid
from gateway.pipeline.sampling import Strict
from quartet.v1 import dit_pb2, server_info_pb2

_BEST = 100


class PictureMembers(Strict):
    """What is said of pictures wherever they are asked for."""

    size: str | None = Field(
        default=None,
        description='"WIDTHxHEIGHT", or "auto": the model\'s size, of an edit about that of the first image',
    )
    output_format: PictureFormat | None = Field(default=None, description="default: png")
    output_compression: Annotated[int, Field(ge=0, le=100)] | None = Field(
        default=None, description="quality of jpeg and webp: 100, the default, is the best"
    )

    @property
    def file_format(self) -> PictureFormat:
        """Format of the files."""
        return self.output_format or "png"

    @property
    def file_quality(self) -> int:
        """Quality of the files, 0 to 100."""
        return _BEST if self.output_compression is None else self.output_compression

    def fill(self, start: dit_pb2.DitStart, info: server_info_pb2.DitInfo) -> None:
        """Sets the size. Raises ApiError: 400 naming the member that contradicts another or the model."""
        if self.output_compression is not None and self.file_format == "png":
            raise invalid("output_compression", "only with output_format jpeg or webp: png loses nothing")
        if self.size not in (None, "auto"):
            fill_size(start, self.size, info, self.file_format, MAX_SIDE_PIXELS[self.file_format])


class PictureOptions(PictureMembers):
    """`quartet.dit` of a chat request: how an answer's pictures are made."""

    negative_prompt: Annotated[str, Field(max_length=MAX_PROMPT_CHARACTERS)] | None = None
    num_inference_steps: Steps | None = None
    guidance_scale: Guidance | None = None
    lora: Loras | None = None


class StreamExtras(Strict):
    """What OpenAI's API has no place for."""

    progress: bool | None = Field(
        default=None, description="quartet.progress events of denoising steps, at most ten a second for a picture"
    )


class ImageRequest(PictureMembers, DiffusionRequest):
    """A request for pictures: OpenAI's members and those of diffusion models."""

    n: Annotated[int, Field(ge=1, lt=2**31)] | None = Field(default=None, description="picture i has seed + i")
    quality: Literal["auto", "low", "medium", "high", "xhigh", "max", "standard", "hd"] | None = Field(
        default=None, description="accepted; without effect: num_inference_steps is what changes it"
    )
    response_format: Literal["b64_json"] | None = Field(default=None, description="pictures are not kept here: no url")
    background: Literal["auto", "opaque"] | None = Field(default=None, description="always opaque")
    moderation: Literal["auto", "low"] | None = Field(default=None, description="accepted; nothing is moderated")
    safety_identifier: Any = Field(default=None, description="accepted; without effect")
    stream: bool | None = None
    partial_images: Annotated[int, Field(ge=0, le=3)] | None = Field(
        default=None, description="previews of each picture, at most 256 pixels a side; only with stream"
    )
    quartet: StreamExtras | None = None

    def image_start(self, info: server_info_pb2.DitInfo) -> dit_pb2.DitStart:
        """The stage's start message, without files and id.

        Raises:
            ApiError: 400 naming the member that contradicts another or the model.
        """
        if self.partial_images and not self.stream:
            raise invalid("partial_images", "only with stream: true")
        if self.quartet is not None and self.quartet.progress and not self.stream:
            raise invalid("quartet.progress", "only with stream: true")
        start = self.start(info)
        self.fill(start, info)
        start.count = self.n or 1
        if start.count > info.max_count:
            raise invalid("n", f"at most {info.max_count} pictures a request")
        steps = self.num_inference_steps or info.default_inference_steps
        start.previews = min(self.partial_images or 0, max(0, steps - 1))
        return start
