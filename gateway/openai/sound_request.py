"""Body of `POST /v1/audio/generations`."""

from typing import Annotated, Literal

from pydantic import Field

from gateway.openai.diffusion import DiffusionRequest

MEDIA_TYPES = {
    "wav": "audio/wav",
    "flac": "audio/flac",
    "mp3": "audio/mpeg",
    "opus": "audio/ogg",
    "aac": "audio/aac",
}


class SoundRequest(DiffusionRequest):
    """A sound to be made."""

    seconds: Annotated[float, Field(gt=0)] | None = Field(default=None, description="default: the model's")
    n: Annotated[int, Field(ge=1, le=1)] | None = Field(default=None, description="the response is one file")
    response_format: Literal["wav", "flac", "mp3", "opus", "aac"] = "wav"
