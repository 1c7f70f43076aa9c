"""Settings of the encoder's process."""

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from services.diffusion.config import PipelineSettings


class EncoderSettings(PipelineSettings):
    """Settings of the encoder: flags, QUARTET_ENCODER_* variables, or keys of the file that --config names."""

    model_config = SettingsConfigDict(env_prefix="QUARTET_ENCODER_")

    shared_memory_mib: int = Field(
        default=256,
        ge=0,
        description="memory for encoded prompts that consumers on this host read, taken at start; 0: none",
    )
    max_running_requests: int = Field(default=1, ge=1, le=1, description="prompts that are encoded at a time")
