"""Settings of the aligner's process."""

from typing import ClassVar

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from services.common.rpc.settings import StageSettings


class AlignerSettings(StageSettings):
    """Settings of the aligner: flags, QUARTET_ALIGNER_* variables, or keys of the file that --config names."""

    model_config = SettingsConfigDict(env_prefix="QUARTET_ALIGNER_")
    for_others: ClassVar[tuple[str, ...]] = ("QUARTET_ALIGNER_MODEL_NAME",)  # docker-compose.yaml's

    max_audio_s: float | None = Field(
        default=None, gt=0, description="longest sound of a request; default: the model's"
    )
    max_words: int = Field(default=1500, ge=1, description="words of a request")
    max_batch_sounds: int = Field(default=8, ge=1, description="sounds of one engine step")
    max_batch_audio_s: float = Field(
        default=600.0,
        gt=0,
        description="seconds of one step's sounds together, each as long as the longest; a sound alone may have more",
    )
