"""Settings of the thinker's process."""

from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field
from pydantic_settings import SettingsConfigDict

from services.common.rpc.settings import CompileSettings


class VllmSettings(CompileSettings):
    """Settings of a stage whose engine is vLLM's."""

    tensor_parallel_size: int = Field(default=1, ge=1, description="GPUs to split the model over")


class ThinkerSettings(VllmSettings):
    """Settings of the thinker: flags, QUARTET_THINKER_* variables, or keys of the file that --config names."""

    model_config = SettingsConfigDict(env_prefix="QUARTET_THINKER_")
    changes_outputs: ClassVar[tuple[str, ...]] = ("video_fps", "tool_call_parser", "reasoning_parser")

    shared_memory_mib: int = Field(
        default=256,
        ge=0,
        description="memory for prompts' states that talkers on this host read, taken at start; 0: none. "
        "A position of 2,048 elements in bfloat16 is 4 KiB",
    )
    max_context_tokens: int | None = Field(
        default=None, ge=2, description="longest prompt plus output; default: the model's, or what the KV cache holds"
    )
    max_batched_tokens: int | None = Field(
        default=None,
        ge=1,
        description="tokens of one engine step, which cuts longer prompts; default: 128 on a CPU, where all answers "
        "wait seconds for a step of thousands; on a GPU vLLM's",
    )
    block_size: int | None = Field(
        default=None, ge=1, description="tokens of a KV block; default: vLLM's for the device"
    )
    gpu_memory_utilization: float = Field(
        default=0.85, gt=0, lt=1, description="share of the GPU for weights, activations, KV cache and hidden states"
    )
    kv_cache_bytes: int | None = Field(
        default=None,
        ge=1,
        description="size of the KV cache, without the hidden states kept beside it; default: on a CPU 1 GiB, "
        "or 65,536 tokens if that is less; on a GPU what gpu_memory_utilization leaves",
    )
    enable_prefix_caching: bool = Field(default=True, description="reuse the KV blocks of prompts that begin alike")
    prompt_logprobs: bool = Field(
        default=False,
        description="tell log-probabilities of prompts to requests that ask for them. A step of these takes up to "
        "vocabulary x 8 bytes more a token, of at most 1,024 tokens on a GPU (1.2 GB with a vocabulary of 152,064) and "
        "of max_batched_tokens on a CPU; gpu_memory_utilization has to leave it free",
    )
    vocabulary_logprobs: bool = Field(
        default=False,
        description="tell log-probabilities of the whole vocabulary (-1) to requests that ask for them, as far as they "
        "are no more than a request may have. Those of a token hold other requests up: a vocabulary of 152,064 for "
        "about a second",
    )
    tool_call_parser: str | None = Field(
        default=None,
        description="name of vLLM's parser of tool calls, for a model that writes them in its own way; "
        "default: that of the model's family, or as its chat template writes them",
    )
    reasoning_parser: str | None = Field(
        default=None,
        description="name of vLLM's parser of thoughts, for a model that marks them in its own way; "
        "default: that of the model's family, or as its chat template writes them",
    )
    lora: dict[str, str] = Field(
        default={}, description="NAME=DIRECTORY of an adapter of the thinker, in peft's format; may be repeated"
    )
    lora_root: Path | None = Field(
        default=None,
        description="directory that adapters loaded at run time are taken from; default: none are loaded at run time",
    )
    lora_experts: bool = Field(
        default=False,
        description="adapters loaded at run time may change experts and their router, on a GPU only; it takes memory "
        "for all experts. Adapters that --lora names need no such permission",
    )
    max_loras: int = Field(default=4, ge=1, description="adapters that requests of one engine step may have")
    max_lora_rank: Annotated[Literal[1, 8, 16, 32, 64, 128, 256, 320, 512], BeforeValidator(int)] = Field(
        default=16, description="highest rank of an adapter; memory is taken for it"
    )
    max_cpu_loras: int = Field(default=8, ge=1, description="adapters that can be loaded at a time, max_loras at least")
    preprocessing_threads: int = Field(
        default=2, ge=1, description="threads that preprocess media, each with a process that decodes"
    )
    decoding_memory_bytes: int = Field(
        default=4 * 1024**3,
        ge=64 * 1024**2,
        description="memory that a process that decodes may take; a file that needs more is refused",
    )
    max_decoding_s: float = Field(default=600.0, gt=0, description="time to decode a file")

    max_images: int = Field(default=16, ge=0, description="images in one request")
    max_audios: int = Field(
        default=256, ge=0, description="audio parts in one request; a spoken conversation has one a turn"
    )
    max_videos: int = Field(default=4, ge=0, description="video parts in one request")
    max_media_bytes: int = Field(default=256 * 1024 * 1024, ge=1, description="encoded media of one request")
    max_image_pixels: int = Field(
        default=64 * 1024 * 1024,
        ge=1,
        description="pixels of one image before it is resized; default: more than a gateway takes, which refuses first",
    )
    max_request_image_pixels: int = Field(
        default=256 * 1024 * 1024, ge=1, description="pixels of all images of a request before they are resized"
    )
    max_audio_s: float = Field(default=1800.0, gt=0, description="longest audio part")
    max_request_sound_s: float = Field(
        default=7200.0, gt=0, description="seconds of all audio parts and sound tracks of videos of a request"
    )
    max_video_s: float = Field(default=600.0, gt=0, description="longest video part")
    max_video_pixels: int = Field(
        default=512 * 1024 * 1024,
        ge=1,
        description="pixels of all frames taken from the videos of a request before they are resized",
    )
    max_request_video_frames: int = Field(
        default=72_000, ge=1, description="frames of all videos of a request, those that are not taken among them"
    )
    video_fps: float = Field(default=2.0, gt=0, description="frames a second taken from a video")

    @property
    def takes_adapters(self) -> bool:
        """Whether there are adapters, or can be."""
        return bool(self.lora) or self.lora_root is not None
