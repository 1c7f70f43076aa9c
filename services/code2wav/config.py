"""Settings of code2wav's process."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field
from pydantic_settings import NoDecode, SettingsConfigDict

from services.code2wav.windows import WindowSettings
from services.common.rpc.settings import CompileSettings, words
from services.common.stream.frames_in_flight import FRAMES_IN_FLIGHT


class Code2WavSettings(CompileSettings):
    """Settings of code2wav: flags, QUARTET_CODE2WAV_* variables, or keys of the file that --config names."""

    model_config = SettingsConfigDict(env_prefix="QUARTET_CODE2WAV_")

    max_frames_per_step: int = Field(
        default=FRAMES_IN_FLIGHT // 8,
        ge=1,
        description="most frames of one stream decoded in one step: what a stream waits for while its listener still "
        "has sound to play; four times as many are taken in before a client reads their samples. "
        "A power of two on a GPU",
    )
    decoding: Literal["windowed", "whole"] | None = Field(
        default=None,
        description="of a decoder that needs frames ahead: windowed decodes stretches as they come (default), whole "
        "decodes all frames at once when the last is there; others refuse it",
    )
    window_frames: Annotated[list[int] | None, NoDecode, BeforeValidator(words)] = Field(
        default=None,
        description="of such a decoder: frames of an utterance's first, second, ... window, the last for all that "
        "follow, e.g. 24,48,96; default: the decoder's",
    )

    @property
    def windows(self) -> WindowSettings:
        return WindowSettings(self.decoding, None if self.window_frames is None else tuple(self.window_frames))
