"""Settings of code2wav's process."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from pydantic_settings import NoDecode, SettingsConfigDict

from services.code2wav.windows import WindowSettings
from services.common.rpc.settings import CompileSettings
from services.common.stream.frames_in_flight import FRAMES_IN_FLIGHT


def _numbers(value: Any) -> Any:
    """Splits the value of a flag or variable at its commas."""
    return [number.strip() for number in value.split(",")] if isinstance(value, str) else value


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
    lead_margin_ms: float = Field(
        default=100.0,
        ge=0,
        description="audio that a listener shall still have when a chunk leaves, beside the time of decoding: covers "
        "the way to the listener",
    )
    threads: int = Field(default=0, ge=0, description="CPU threads of a step; 0: torch's default, one per core")

    decoding: Literal["windowed", "whole"] | None = Field(
        default=None,
        description="of a decoder that needs frames ahead: windowed decodes stretches as they come (default), whole "
        "decodes all frames at once when the last is there; others refuse it",
    )
    window_frames: Annotated[list[int] | None, NoDecode, BeforeValidator(_numbers)] = Field(
        default=None,
        description="of such a decoder: frames of an utterance's first, second, ... window, the last for all that "
        "follow, e.g. 24,48,96; default: the decoder's",
    )
    window_past_frames: int | None = Field(
        default=None, ge=0, description="frames before a window that it is decoded with; default: the decoder's"
    )
    window_future_frames: int | None = Field(
        default=None, ge=0, description="frames after it, which sound waits for; default: the decoder's"
    )

    @property
    def windows(self) -> WindowSettings:
        frames = None if self.window_frames is None else tuple(self.window_frames)
        return WindowSettings(self.decoding, frames, self.window_past_frames, self.window_future_frames)
