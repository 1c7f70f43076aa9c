"""Settings of the diffusion stage's process."""

from typing import ClassVar, Literal

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from services.diffusion.config import PipelineSettings


class DitSettings(PipelineSettings):
    """Settings of the diffusion stage: flags, QUARTET_DIT_* variables, or keys of the file that --config names."""

    model_config = SettingsConfigDict(env_prefix="QUARTET_DIT_")
    for_others: ClassVar[tuple[str, ...]] = ("QUARTET_DIT_MODEL_NAME",)  # docker-compose.yaml's
    changes_outputs: ClassVar[tuple[str, ...]] = (
        *("cache", "cache_threshold", "cache_interval_steps"),
        *("vae_tiling", "quantization", "encoders"),
    )

    max_running_requests: int = Field(default=8, ge=1, description="requests the engine works on at a time")
    max_running_outputs: int = Field(
        default=8, ge=1, description="outputs of all requests that are denoised at a time; bounds memory"
    )
    max_batch: int = Field(default=8, ge=1, description="most outputs that share a denoising step")
    attention_backend: str | None = Field(
        default=None,
        description="diffusers' name of an attention backend, e.g. native, flash, sage; default: diffusers' choice",
    )
    cache: Literal["none", "first-block", "taylorseer"] = Field(
        default="none",
        description="reuses results of earlier steps: faster, not exact; steps are not shared between outputs",
    )
    cache_threshold: float = Field(
        default=0.05,
        gt=0,
        description="first-block: relative change of the first block's output up to which a step is skipped",
    )
    cache_interval_steps: int = Field(
        default=5, ge=2, description="taylorseer: every so many steps one is computed in full"
    )
    compile: Literal["on", "off"] = Field(
        default="off", description="on: torch.compile the transformer's repeated blocks, minutes at the start"
    )
    vae_slicing: bool = Field(default=False, description="decode pictures one at a time: less memory")
    vae_tiling: bool = Field(
        default=False, description="decode large pictures in tiles: less memory, seams are blended"
    )
    offload: Literal["none", "model", "group", "sequential"] = Field(
        default="none",
        description="what is kept off the device while it is not used: models, groups of blocks, single layers",
    )
    quantization: Literal[
        "none", "float8-storage", "bitsandbytes-8bit", "bitsandbytes-4bit", "torchao-int8", "torchao-float8"
    ] = Field(default="none", description="of the transformer; bitsandbytes and torchao are packages of their own")
    context_parallel_ulysses: int = Field(
        default=1,
        ge=1,
        description="devices that share each attention's heads; the other devices' processes are started here",
    )
    context_parallel_ring: int = Field(
        default=1,
        ge=1,
        description="devices that pass keys and values around; times context_parallel_ulysses devices are used",
    )
    encoders: Literal["own", "stream"] = Field(
        default="own",
        description="stream: prompts come encoded from an encoder's process; text encoders are not loaded here",
    )
    lora: dict[str, str] = Field(default={}, description="NAME=DIRECTORY_OR_FILE of an adapter; may be repeated")

    @property
    def parallel_devices(self) -> int:
        """Devices that share a denoising call."""
        return self.context_parallel_ulysses * self.context_parallel_ring
