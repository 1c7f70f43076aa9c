"""Requests for transcriptions and translations."""

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from gateway.answers import harmless
from gateway.answers.beams import BeamMembers
from gateway.answers.transcription.languages import code_of, language_of
from gateway.errors import invalid
from gateway.listening.speech_windows import Pauses
from gateway.pipeline.sampling import TranscriptSampling
from gateway.validation import Listed, Strict, ignoring
from quartet.v1 import media_pb2, thinker_pb2


class VadConfig(Strict):
    """Definition of a pause."""

    type: Literal["server_vad"]
    threshold: Annotated[float, Field(gt=0, lt=1)] = 0.5
    prefix_padding_ms: Annotated[int, Field(ge=0, le=2000)] = 200
    silence_duration_ms: Annotated[int, Field(ge=100, le=10_000)] = 500


def _as_strategy(value: Any) -> Any:
    return {"type": "server_vad"} if value in (None, "auto") else value


def _language(named: str) -> str | None:
    return None if named.strip().lower() in ("", "auto") else language_of(named)


class TranslationRequest(BeamMembers, ignoring(TranscriptSampling, *harmless.TRANSCRIPTIONS)):
    """Audio to be translated into English text."""

    task: ClassVar[str] = "translate"
    model: str | None = Field(default=None, description="default, or a name of OpenAI's: the model that hears")
    language: Annotated[str, AfterValidator(_language)] | None = Field(
        default=None, description="of the sound: ISO 639-1 code or English name; default, or auto: the model finds it"
    )
    languages: Listed[Annotated[str, AfterValidator(_language)]] | None = Field(
        default=None, description="instead of language: one; of several, the model finds which"
    )
    prompt: str | None = Field(default=None, description="names and terms that may be said, and their spelling")
    keywords: Listed[str] | None = Field(default=None, description="added to prompt")
    hotwords: str | None = Field(default=None, description="added to prompt")
    to_language: Annotated[str, AfterValidator(language_of)] | None = Field(
        default=None, description="of the text: ISO 639-1 code or English name; default: English"
    )
    response_format: Literal["json", "text", "verbose_json", "srt", "vtt"] = "json"
    temperature: Annotated[float, Field(ge=0, le=1)] = 0.0
    max_completion_tokens: Annotated[int, Field(ge=1, le=4096)] = Field(default=1024, description="of a piece of 30 s")
    n: Annotated[int, Field(ge=1)] | None = Field(
        default=None, description="beams of use_beam_search; the best is the transcript"
    )
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = Field(default=None, description="as chat's")
    stream: bool = False
    stream_include_usage: bool = Field(default=False, description="a stream's events are vLLM's chunks as well")
    stream_continuous_usage_stats: bool = Field(default=False, description="each chunk has the usage so far")

    @model_validator(mode="after")
    def _has_one_spelling(self) -> Self:
        """Of members that other servers call otherwise."""
        if self.language is None and len(self.languages or ()) == 1:
            self.language = (self.languages or [None])[0]
        self.prompt = ", ".join(filter(None, (self.prompt, *(self.keywords or ()), self.hotwords))) or None
        return self

    @property
    def pauses(self) -> Pauses:
        return Pauses()

    @property
    def instruction(self) -> str:
        """For the thinker."""
        speech = f"{self.language} speech" if self.language else "speech"
        return f"Listen to the provided {speech} and produce a translation in {self.to_language or 'English'} text."

    def transcription(self, sound: media_pb2.Media) -> thinker_pb2.Transcription:
        """For a model that has prompts of its own for it."""
        languages = {name: code_of(getattr(self, name)) for name in ("language", "to_language")}
        return thinker_pb2.Transcription(
            sound=sound, translates=self.task == "translate", hints=self.prompt or "", **languages
        )

    @property
    def text_language(self) -> str:
        return (self.to_language or "english").lower()

    @property
    def wants_words(self) -> bool:
        return False

    @property
    def wants_segments(self) -> bool:
        """In the verbose form."""
        return True

    def check(self) -> None:
        """Raises ApiError: 400 naming a member that contradicts another."""
        self.check_beams(self.n or 1)
        if not self.use_beam_search and (self.n or 1) > 1:
            raise invalid("n", "only with use_beam_search: true; a sound has one transcript")
        if self.stream and self.response_format not in ("json", "text"):
            raise invalid("stream", "only with response_format json or text")


class TranscriptionRequest(TranslationRequest):
    """Audio to be transcribed."""

    task: ClassVar[str] = "transcribe"
    timestamp_granularities: Listed[Literal["segment", "word"]] | None = Field(
        default=None, description="only with verbose_json; word needs an aligner"
    )
    chunking_strategy: Annotated[VadConfig, BeforeValidator(_as_strategy)] = VadConfig(type="server_vad")

    @property
    def pauses(self) -> Pauses:
        vad = self.chunking_strategy
        return Pauses(vad.threshold, vad.silence_duration_ms / 1000, vad.prefix_padding_ms / 1000)

    @property
    def instruction(self) -> str:
        audio = f"{self.language} audio" if self.language else "audio"
        return f"Transcribe the {audio} into text."

    @property
    def text_language(self) -> str:
        return (self.language or "unknown").lower()

    @property
    def wants_words(self) -> bool:
        return "word" in (self.timestamp_granularities or ())

    @property
    def wants_segments(self) -> bool:
        return not self.timestamp_granularities or "segment" in self.timestamp_granularities

    def check(self) -> None:
        if self.to_language is not None:
            raise invalid("to_language", "a transcription has the language that is spoken; use /v1/audio/translations")
        if self.timestamp_granularities and self.response_format != "verbose_json":
            raise invalid("timestamp_granularities", "only with response_format verbose_json")
        super().check()
