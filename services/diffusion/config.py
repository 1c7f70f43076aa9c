"""Settings of every process that has a diffusers pipeline."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from services.common.rpc.settings import StageSettings
from services.demo_models import PAINTER, PAINTER_SIZE, resolve

Size = Annotated[str, Field(pattern=r"^[1-9][0-9]{0,4}x[1-9][0-9]{0,4}$")]


class PipelineSettings(StageSettings):
    """Limits and defaults of requests."""

    max_queued_requests: int = Field(default=32, ge=0, description="requests that may wait; more are refused")
    max_count: int = Field(default=10, ge=1, description="most outputs of a request")
    max_pixels: int = Field(default=2048 * 2048, ge=1, description="most pixels of a picture or of a video's frame")
    max_frames: int = Field(default=161, ge=1, description="most frames of a video")
    max_video_pixels: int = Field(
        default=200_000_000,
        ge=1,
        description="most pixels of all frames of a request for videos: each takes 4 bytes here",
    )
    max_inference_steps: int = Field(default=200, ge=2, description="most denoising steps of a request")
    default_size: Size | None = Field(default=None, description="WIDTHxHEIGHT in pixels; default: the model's")
    default_inference_steps: int | None = Field(
        default=None, ge=1, description="denoising steps; default: the pipeline's"
    )
    default_guidance_scale: float | None = Field(default=None, ge=0, description="guidance; default: the pipeline's")
    max_media_bytes: int = Field(
        default=64 * 1024 * 1024, ge=1, description="all pictures of a request together, encoded"
    )
    max_request_image_pixels: int = Field(
        default=32_000_000,
        ge=1,
        description="most pixels of a request's pictures together: each takes 3 bytes while the request waits, so the "
        "default is 96 MB a request",
    )
    max_request_video_pixels: int = Field(
        default=64_000_000,
        ge=1,
        description="most pixels of the frames of a request's own video, scaled for the output: each takes 3 bytes "
        "while the request waits, so the default is 192 MB a request",
    )
    decoding_memory_bytes: int = Field(
        default=1024 * 1024 * 1024,
        ge=64 * 1024 * 1024,
        description="memory that a process that decodes pictures may take; a file that needs more is refused",
    )
    encoding_cache_mib: int = Field(
        default=64,
        ge=0,
        description="memory for encoded prompts and images that come again, on the device; 0: none are kept",
    )
    max_decoding_s: float = Field(default=60.0, gt=0, description="time to decode a picture")

    @model_validator(mode="after")
    def _keeps_to_the_painters_size(self) -> Self:
        """The painter has learnt one size; its pipeline's default is eight times as wide."""
        if self.model == resolve(PAINTER):
            self.default_size = self.default_size or PAINTER_SIZE
        return self
