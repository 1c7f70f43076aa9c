"""Settings of the dit's process."""

import math
from typing import Annotated, ClassVar, Literal

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from services.common.rpc.settings import StageSettings

Size = Annotated[str, Field(pattern=r"^[1-9][0-9]{0,4}x[1-9][0-9]{0,4}$")]


class PipelineSettings(StageSettings):
    """What every process of a diffusers pipeline has: limits and defaults of requests."""

    max_queued_requests: int = Field(32, ge=0, description="requests that may wait; more are refused")
    max_count: int = Field(10, ge=1, description="most outputs of a request")
    max_pixels: int = Field(2048 * 2048, ge=1, description="most pixels of a picture or of a video's frame")
    max_side: int = Field(8192, ge=1, description="most pixels a side, where the model takes that many")
    max_frames: int = Field(161, ge=1, description="most frames of a video")
    max_video_pixels: int = Field(
        200_000_000, ge=1, description="most pixels of all frames of a request for videos: each takes 4 bytes here"
    )
    max_inference_steps: int = Field(200, ge=2, description="most denoising steps of a request")
    default_size: Size | None = Field(None, description="WIDTHxHEIGHT in pixels; default: the model's")
    default_inference_steps: int | None = Field(None, ge=1, description="denoising steps; default: the pipeline's")
    default_guidance_scale: float | None = Field(None, ge=0, description="guidance; default: the pipeline's")
    default_frames: int | None = Field(None, ge=1, description="frames of a video; default: the pipeline's")
    default_audio_s: float = Field(10.0, gt=0, description="seconds of sound, at most what the model can make")
    frames_per_second: float | None = Field(None, gt=0, description="of videos; default: the model's")
    max_media_bytes: int = Field(64 * 1024 * 1024, ge=1, description="all pictures of a request together, encoded")
    max_image_pixels: int = Field(
        32_000_000, ge=1, description="most pixels of a request's pictures together: each takes 3 bytes while it waits"
    )
    max_aspect_ratio: float = Field(32.0, ge=1, description="of a picture that comes in, longer to shorter side")
    min_image_side: int = Field(4, ge=1, description="least width and height of a picture that comes in")
    threads: int = Field(0, ge=0, description="CPU threads of a step; 0: torch's default, one per core")

    @property
    def default_width_height(self) -> tuple[int, int] | None:
        """`default_size` as (width, height)."""
        if self.default_size is None:
            return None
        width, height = map(int, self.default_size.split("x"))
        return width, height

    def frame_limit(self, multiple: int) -> int:
        """Most frames, one more than a multiple of `multiple`."""
        return math.floor((self.max_frames - 1) / multiple) * multiple + 1


class DitSettings(PipelineSettings):
    """Settings of the dit: flags, QUARTET_DIT_* variables, or keys of the file that --config names."""

    model_config = SettingsConfigDict(env_prefix="QUARTET_DIT_")
    for_others: ClassVar[tuple[str, ...]] = ("QUARTET_DIT_MODEL_NAME",)  # docker-compose.yaml's
    changes_outputs: ClassVar[tuple[str, ...]] = (
        *("cache", "cache_threshold", "cache_interval_steps"),
        *("vae_tiling", "quantization", "encoders"),
    )

    max_running_requests: int = Field(8, ge=1, description="outputs that are denoised at a time; bounds memory")
    max_batch: int = Field(8, ge=1, description="most outputs that share a denoising step")
    attention_backend: str | None = Field(
        None,
        description="diffusers' name of an attention backend, e.g. native, flash, sage; default: diffusers' choice",
    )
    cache: Literal["none", "first-block", "taylorseer"] = Field(
        "none", description="reuses results of earlier steps: faster, not exact; steps are not shared between outputs"
    )
    cache_threshold: float = Field(
        0.05, gt=0, description="first-block: relative change of the first block's output up to which a step is skipped"
    )
    cache_interval_steps: int = Field(5, ge=2, description="taylorseer: every so many steps one is computed in full")
    compile_blocks: bool = Field(False, description="torch.compile the transformer's repeated blocks")
    vae_slicing: bool = Field(False, description="decode pictures one at a time: less memory")
    vae_tiling: bool = Field(False, description="decode large pictures in tiles: less memory, seams are blended")
    offload: Literal["none", "model", "group", "sequential"] = Field(
        "none", description="what is kept off the device while it is not used: models, groups of blocks, single layers"
    )
    quantization: Literal[
        "none", "float8-storage", "bitsandbytes-8bit", "bitsandbytes-4bit", "torchao-int8", "torchao-float8"
    ] = Field("none", description="of the transformer; bitsandbytes and torchao are packages of their own")
    context_parallel_ulysses: int = Field(
        1, ge=1, description="devices that share each attention's heads; the other devices' processes are started here"
    )
    context_parallel_ring: int = Field(
        1, ge=1, description="devices that pass keys and values around; times context_parallel_ulysses devices are used"
    )
    encoders: Literal["own", "stream"] = Field(
        "own", description="stream: prompts come encoded from an encoder's process; text encoders are not loaded here"
    )
    lora: dict[str, str] = Field({}, description="NAME=DIRECTORY_OR_FILE of an adapter; may be repeated")

    @property
    def parallel_devices(self) -> int:
        """Devices that share a denoising call."""
        return self.context_parallel_ulysses * self.context_parallel_ring
