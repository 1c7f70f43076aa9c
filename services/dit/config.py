"""Settings of the diffusion stage's process."""

from math import prod
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field, PositiveInt
from pydantic_settings import NoDecode, SettingsConfigDict

from services.common.rpc.settings import words
from services.diffusion.config import PipelineSettings

Cache = Annotated[str, Field(pattern=r"^(none|first-block(:\d*\.?\d+)?|taylorseer(:([2-9]|[1-9]\d+))?)$")]


class DitSettings(PipelineSettings):
    """Settings of the diffusion stage: flags, QUARTET_DIT_* variables, or keys of the file that --config names."""

    model_config = SettingsConfigDict(env_prefix="QUARTET_DIT_")
    for_others: ClassVar[tuple[str, ...]] = ("QUARTET_DIT_MODEL_NAME",)  # docker-compose.yaml's
    changes_outputs: ClassVar[tuple[str, ...]] = (
        "cache",
        "vae_decoding",
        "quantization",
        "encoders",
        "controlnet",
        "safety_checker",
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
    cache: Cache = Field(
        default="none",
        description="reuses results of earlier steps: faster, not exact; steps are not shared between outputs. "
        "none; first-block:0.05, the relative change of the first block's output up to which a step is skipped; or "
        "taylorseer:5, every so many steps one is computed in full",
    )
    compile: Literal["on", "off"] = Field(
        default="off", description="on: torch.compile the transformer's repeated blocks, minutes at the start"
    )
    vae_decoding: Literal["whole", "sliced", "tiled"] = Field(
        default="whole",
        description="sliced: pictures are decoded one at a time, for less memory; tiled: large ones also in tiles, "
        "whose seams are blended",
    )
    offload: Literal["none", "model", "group", "sequential"] = Field(
        default="none",
        description="what is kept off the device while it is not used: models, groups of blocks, single layers",
    )
    quantization: Literal[
        "none", "float8-storage", "bitsandbytes-8bit", "bitsandbytes-4bit", "torchao-int8", "torchao-float8"
    ] = Field(default="none", description="of the transformer; bitsandbytes and torchao are packages of their own")
    context_parallel: dict[Literal["ulysses", "ring"], PositiveInt] = Field(
        default={},
        description="ulysses=N: N devices share each attention's heads; ring=N: N devices pass keys and values around; "
        "with both, their product; the other devices' processes are started here",
    )
    encoders: Literal["own", "stream"] = Field(
        default="own",
        description="stream: prompts come encoded from an encoder's process; text encoders are not loaded here",
    )
    controlnet: Annotated[list[str], NoDecode, BeforeValidator(words)] = Field(
        default=[],
        description="directories or hub ids, with commas between, of ControlNets or T2I adapters for the model; each "
        "request brings a control image for each of them",
    )
    safety_checker: Literal["own", "off"] = Field(
        default="own",
        description="off: without the checker of prompts and outputs that the pipeline's class has; the checkpoint's "
        "licence may want it",
    )
    lora: dict[str, str] = Field(default={}, description="NAME=DIRECTORY_OR_FILE of an adapter; may be repeated")

    @property
    def parallel_devices(self) -> int:
        """Devices that share a denoising call."""
        return prod(self.context_parallel.values())

    @property
    def parallelism(self) -> str:
        """`context_parallel` as messages name it."""
        return "context_parallel " + ", ".join(f"{kind}={degree}" for kind, degree in self.context_parallel.items())
