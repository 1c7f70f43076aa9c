"""Settings of code2wav's process."""

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from services.common.rpc.settings import StageSettings


class Code2WavSettings(StageSettings):
    """Settings of code2wav: flags, QUARTET_CODE2WAV_* variables, or keys of the file that --config names."""

    model_config = SettingsConfigDict(env_prefix="QUARTET_CODE2WAV_")

    max_frames_per_step: int = Field(
        default=16,
        ge=1,
        description="most frames of one stream decoded in one step: what a stream waits for while its listener still "
        "has sound to play; four times as many are taken in before a client reads their samples",
    )
    lead_margin_ms: float = Field(
        default=100.0,
        ge=0,
        description="audio that a listener shall still have when a chunk leaves, beside the time of decoding: covers "
        "the way to the listener",
    )
    threads: int = Field(default=0, ge=0, description="CPU threads of a step; 0: torch's default, one per core")

    enforce_eager: bool | None = Field(
        default=None,
        description="whether steps run without CUDA graphs; default: captured on CUDA, where max_frames_per_step "
        "should be a power of two; a CPU always runs them eagerly",
    )
