"""Settings of the talker."""

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from services.common.rpc.settings import CompileSettings


class TalkerSettings(CompileSettings):
    """Turns a thinker's tokens and states into codec frames."""

    model_config = SettingsConfigDict(env_prefix="QUARTET_TALKER_")

    max_context_positions: int = Field(
        default=8192,
        ge=16,
        description="longest prompt plus frames; key-value memory is reserved for this many a request",
    )
