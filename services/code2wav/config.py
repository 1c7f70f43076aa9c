"""Settings of code2wav's process."""

from typing import Self

from pydantic import Field, model_validator
from pydantic_settings import SettingsConfigDict

from services.common.rpc.settings import StageSettings


class Code2WavSettings(StageSettings):
    """Settings of code2wav: flags, QUARTET_CODE2WAV_* variables, or keys of the file that --config names."""

    model_config = SettingsConfigDict(env_prefix="QUARTET_CODE2WAV_")

    sample_rate_hz: int | None = Field(
        None,
        ge=1,
        description="samples a second that clients are told; default: what the checkpoint states, else its samples "
        "per frame at the codec's 12.5 frames a second",
    )
    max_frames_per_step: int = Field(
        16,
        ge=1,
        description="most frames of one stream decoded in one step: what a stream waits for while its listener still "
        "has sound to play",
    )
    lead_margin_ms: float = Field(
        100.0,
        ge=0,
        description="audio that a listener shall still have when a chunk leaves, beside the time of decoding: covers "
        "the way to the listener",
    )
    max_frames_ahead: int = Field(
        64,
        ge=1,
        description="frames of one request taken in before their samples have left; bounds its memory; at least "
        "max_frames_per_step",
    )
    threads: int = Field(0, ge=0, description="CPU threads of a step; 0: torch's default, one per core")

    enforce_eager: bool | None = Field(
        None,
        description="whether steps run without CUDA graphs; default: captured on CUDA, where max_frames_per_step "
        "should be a power of two; a CPU always runs them eagerly",
    )

    @model_validator(mode="after")
    def _window_holds_a_step(self) -> Self:
        if self.max_frames_ahead < self.max_frames_per_step:
            raise ValueError(
                f"max_frames_ahead {self.max_frames_ahead} must be at least max_frames_per_step "
                f"{self.max_frames_per_step}, which a stream waits for"
            )
        return self
