"""Tools that run here, as requests name them."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from gateway.media.encode import ImageFormat
from gateway.validation import Strict

IMAGE_TOOL = "image_generation"
VIDEO_TOOL = "video_generation"
SOUND_TOOL = "sound_generation"


class ImageTool(BaseModel):
    """OpenAI's image_generation. Settings that say nothing to a model here are accepted: background, input_fidelity,
    moderation, quality.
    """

    model_config = ConfigDict(extra="ignore", strict=True)

    type: Literal["image_generation"] = IMAGE_TOOL
    action: Literal["generate", "edit", "auto"] | None = Field(default=None, description="default: the model decides")
    model: str | None = Field(default=None, description="accepted; the pipeline's own makes them")
    size: str | None = Field(default=None, description='"WIDTHxHEIGHT" or "auto", the model\'s own')
    output_format: ImageFormat | None = Field(default=None, description="default: png")
    output_compression: int | None = Field(default=None, ge=0, le=100)
    partial_images: int | None = Field(default=None, ge=0, le=3, description="previews; only with stream")
    input_image_mask: dict[str, Any] | None = None


class VideoTool(Strict):
    """Quartet's own."""

    type: Literal["video_generation"] = VIDEO_TOOL
    seconds: float | None = Field(default=None, gt=0, description="default: the model's")
    size: str | None = Field(default=None, description='"WIDTHxHEIGHT"; default: the model\'s')


class SoundTool(Strict):
    """Quartet's own."""

    type: Literal["sound_generation"] = SOUND_TOOL
    seconds: float | None = Field(default=None, gt=0, description="default: the model's")
    output_format: Literal["wav", "flac", "mp3", "opus", "aac"] | None = Field(default=None, description="default: wav")
