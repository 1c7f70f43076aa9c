"""Settings of code2wav's process."""

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from services.common.settings import StageSettings


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
        8, ge=1, description="frames of one stream decoded in one step; more is faster, but others wait longer"
    )
    max_frames_ahead: int = Field(
        64, ge=1, description="frames of one request taken in before their samples have left; bounds its memory"
    )
    threads: int = Field(0, ge=0, description="CPU threads of a step; 0: torch's default, one per core")
