"""Requests for transcriptions and translations."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from gateway.listening.speech_windows import Pauses
from gateway.validation import Strict


class VadConfig(Strict):
    """Definition of a pause."""

    type: Literal["server_vad"]
    threshold: Annotated[float, Field(gt=0, lt=1)] = 0.5
    prefix_padding_ms: Annotated[int, Field(ge=0, le=2000)] = 200
    silence_duration_ms: Annotated[int, Field(ge=100, le=10_000)] = 500

    @property
    def pauses(self) -> Pauses:
        return Pauses(self.threshold, self.silence_duration_ms / 1000, self.prefix_padding_ms / 1000)


def _as_strategy(value: Any) -> Any:
    return {"type": "server_vad"} if value in (None, "auto") else value


class TranslationRequest(Strict):
    """Audio to be translated into English text."""

    model: str
    language: str | None = Field(
        default=None, description="of the sound: ISO 639-1 code or English name; default: the model finds it"
    )
    prompt: str | None = Field(default=None, description="names and terms that may be said, and their spelling")
    response_format: Literal["json", "text", "verbose_json", "srt", "vtt"] = "json"
    temperature: Annotated[float, Field(ge=0, le=1)] = 0.0
    max_completion_tokens: Annotated[int, Field(ge=1, le=4096)] = Field(
        default=1024, description="of each piece, of at most 30 s: fast speech has some 200"
    )
    stream: bool = False
    stream_include_usage: bool = Field(default=False, description="a stream's events are vLLM's chunks as well")
    stream_continuous_usage_stats: Any = Field(default=None, description="accepted; without effect")


class TranscriptionRequest(TranslationRequest):
    """Audio to be transcribed."""

    timestamp_granularities: list[Literal["segment"]] | None = None
    chunking_strategy: Annotated[VadConfig, BeforeValidator(_as_strategy)] = VadConfig(type="server_vad")
