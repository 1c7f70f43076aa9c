"""Settings of the talker."""

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from services.common.rpc.settings import CompileSettings
from services.common.stream.frames_in_flight import FRAMES_IN_FLIGHT


class TalkerSettings(CompileSettings):
    """Turns a thinker's tokens and states into codec frames."""

    model_config = SettingsConfigDict(env_prefix="QUARTET_TALKER_")

    max_context_positions: int = Field(
        default=8192,
        ge=16,
        description="longest prompt plus frames; key-value memory is reserved for this many a request",
    )
    prefill_chunk_positions: int = Field(
        default=512, ge=1, description="most prompt positions, of all waiting requests together, run between two frames"
    )
    max_frames_ahead: int = Field(
        default=FRAMES_IN_FLIGHT,
        ge=1,
        description="codec frames of a request that its consumer has not read, after which it stands still",
    )
